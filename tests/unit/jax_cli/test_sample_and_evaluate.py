"""`jaxres sample` and `jaxres evaluate`: texts, and probabilities of texts."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxres
from jaxres import inference, models
from jaxres.__main__ import main
from jaxres.checkpoint.weights import export as weights_export
from jaxres.config.schema.data import DataSection, HuggingfaceTokenizer, TokensSource
from jaxres.config.schema.model import GptModel, MlpModel
from jaxres.data import write_tokens
from jaxres.data.tokens.token_folder import open_tokens
from jaxres.data.tokens.tokenizer import open_tokenizer
from jaxres.engine import text_scores
from jaxres.faults import ConfigError
from jaxres.jax_cli import evaluate
from jaxres.models.generate import Sampling, generate
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.supervisor import run_config
from jaxres.telemetry.stdio import escaped
from tests import bpe
from tests.tiers import slow_but
from tests.unit.checkpoint import families

ROWS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model") / "llama"
    families.write_folder(root, families.CONFIGS["llama"] | {"vocab_size": ROWS})
    return bpe.train(root, vocab_size=ROWS)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> jaxres.LoadedModel:
    return jaxres.load_model(folder)


def logits_of(loaded, tokens: list[int]) -> np.ndarray:
    """Returns logits_TV of one row, padded at its end so that one program computes all."""
    return loaded.logits([tokens + [0] * (24 - len(tokens))])[0, : len(tokens)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        *(pytest.param(given, marks=pytest.mark.slow) for given in ({"top_k": 1}, {"top_p": 1e-6})),
    ],
)
def test_the_most_probable_tokens_are_those_of_the_whole_row_each_time(loaded, given):
    prompt = loaded.tokenizer.encode("def ")
    tokens = list(prompt)
    for _ in range(6):
        tokens.append(int(logits_of(loaded, tokens)[-1].argmax()))
    drawn = [int(drawn[0]) for drawn in loaded.stream("def ", tokens=6, seed=3, **given)]
    assert drawn == tokens[len(prompt) :]


def test_prompts_texts_and_questions_that_spell_special_tokens_are_text(loaded):
    tokenizer, text = loaded.tokenizer, f"a{bpe.END}b <s>"
    special = {tokenizer.library.token_to_id(name) for name in (bpe.END, "<s>", "<pad>")}
    rows = text_scores.text_rows(text, tokenizer, seq_len=200)
    rows += text_scores.choice_rows(text_scores.Question(text, ("<s>", "<pad>"), 0), tokenizer)
    assert len(rows) == 3
    for tokens in (tokenizer.encode(text), *(tokens[1:] for tokens, _ in rows)):
        assert special.isdisjoint(tokens)


@pytest.mark.parametrize("special", ["text", "control"])
def test_a_prompt_of_a_run_is_encoded_as_its_texts_were(folder, tmp_path, monkeypatch, special):
    section = HuggingfaceTokenizer(path=folder, special_tokens=special)
    name = open_tokenizer(section).name
    run_dir = RunDir(tmp_path)
    shutil.copytree(folder, run_dir.tokenizer(name))
    config = SimpleNamespace(data=SimpleNamespace(tokenizer=section))
    monkeypatch.setattr(inference, "history_of", lambda _: SimpleNamespace(tokenizer=name))
    monkeypatch.setattr(inference.run_config, "newest_config", lambda _: config)
    tokenizer = inference.tokenizer_of(run_dir)
    end = tokenizer.end_of_document
    assert (end in tokenizer.encode(f"a{bpe.END}b")) == (special == "control")


@pytest.mark.slow
def test_a_seed_repeats_a_text_and_rows_and_seeds_differ(loaded):
    first = loaded.sample("x", tokens=20, rows=2, seed=1)
    assert first == loaded.sample("x", tokens=20, rows=2, seed=1)
    assert first[0] != first[1]
    assert first != loaded.sample("x", tokens=20, rows=2, seed=2)


@pytest.mark.slow
def test_a_model_without_a_cache_is_sampled_by_its_last_window():
    model = models.build(MlpModel(), vocab_size=9, seq_len=4, platform="cpu")
    params = model.init(jax.random.key(0))
    greedy = Sampling(temperature=0.0)
    drawn = generate(model, params, [1, 2], count=9, seq_len=4, sampling=greedy, num_rows=2)
    tokens = np.array(list(drawn))
    assert (tokens[:, 0] == tokens[:, 1]).all()
    last = 2
    for token in tokens[:, 0].tolist():  # This model sees the current token alone.
        last = int(np.asarray(model.logits(params, jax.numpy.array([[last]])))[0, -1].argmax())
        assert token == last


def test_more_positions_than_a_model_has_are_an_error(tmp_path):
    root = families.write_folder(tmp_path, families.CONFIGS["gpt2"] | {"vocab_size": ROWS})
    found = jaxres.load_model(bpe.train(root, vocab_size=ROWS))
    with pytest.raises(ConfigError, match="the model has 16"):
        found.sample("", tokens=16)


def log_probability(loaded, tokens: list[int], measured: int) -> float:
    """Computes with one whole row, in float64."""
    logits = logits_of(loaded, tokens[:-1]).astype(np.float64)
    nats = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    nats -= logits.max(-1, keepdims=True)
    return sum(
        nats[at, tokens[at + 1]] for at in range(len(tokens) - 1 - measured, len(tokens) - 1)
    )


@pytest.mark.slow
def test_choices_are_scored_by_their_log_probability_after_the_question(
    loaded, tmp_path, capsys, folder
):
    tokenizer, questions = loaded.tokenizer, []
    for text in ("def f(x):", "import", "class A"):
        probabilities = []
        for choice in ("return x", "os", "(B):"):
            start = len(tokenizer.encode(text))
            tokens = [tokenizer.end_of_document, *tokenizer.encode(f"{text} {choice}")]
            probabilities.append(log_probability(loaded, tokens, len(tokens) - 1 - start))
        by_bytes = np.array(probabilities) / [8, 2, 4]
        questions.append((text, int(np.argmax(probabilities)), int(np.argmax(by_bytes))))
    rows = [
        {"query": text, "choices": ["return x", "os", "(B):"], "gold": best}
        for text, best, _ in questions
    ]
    rows[1] = {
        "ctx": rows[1]["query"],
        "endings": rows[1]["choices"],
        "label": str(rows[1]["gold"]),
    }
    wrong = rows[2]["choices"][(rows[2]["gold"] + 1) % 3]
    rows[2] = {"question": rows[2]["query"], "choices": rows[2]["choices"], "answer": wrong}
    task = tmp_path / "mine.jsonl"
    task.write_text("\n".join(json.dumps(row) for row in rows))
    assert main(["evaluate", str(folder), "--task", str(task), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]["mine"]
    assert scores["acc"] == pytest.approx(2 / 3)
    assert scores["acc_stderr"] == pytest.approx(math.sqrt(2 / 9 * 3 / 2 / 3))
    right = [questions[0][1] == questions[0][2], questions[1][1] == questions[1][2]]
    right.append(["return x", "os", "(B):"][questions[2][2]] == wrong)
    assert scores["acc_norm"] == pytest.approx(np.mean(right))


@pytest.mark.slow
def test_perplexity_measures_each_token_once_in_rows_of_the_models_length(loaded, tmp_path):
    text = "import os\n" * 12
    tokenizer, seq_len = loaded.tokenizer, 16
    rows = text_scores.text_rows(text, tokenizer, seq_len=seq_len)
    count = len(tokenizer.encode(text))
    assert sum(measured for _, measured in rows) == count
    assert {len(tokens) for tokens, _ in rows} == {seq_len + 1}, "the last row sees as much"
    expected = sum(log_probability(loaded, *row) for row in rows)
    short = text_scores.Likelihood(loaded.model.logits, loaded.params, seq_len=seq_len)
    scores = text_scores.score_texts([text], tokenizer, short)
    assert scores["bits_per_byte"] == pytest.approx(-expected / len(text) / math.log(2), rel=1e-5)
    assert scores["word_perplexity"] == pytest.approx(math.exp(-expected / 24), rel=1e-4)


def test_a_row_of_lm_eval_has_its_own_fields_beside_those_of_the_source() -> None:
    own = {"query": "Dance: A man", "choices": ["b", "c"], "gold": 1}
    source = {"ctx": "A man", "endings": ["b", "c"], "label": "1", "text": "A man", "answer": None}
    assert text_scores.parse(own | source, "x") == text_scores.parse(own, "x")
    equal = {"question": "a", "ctx": "a", "endings": ["b", "c"], "label": 0, "answer": 0}
    assert text_scores.parse(equal, "x") == text_scores.Question("a", ("b", "c"), 0)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "bad.jsonl:1: not JSON"),
        (r'{"text": "a\ud800"}', "bad.jsonl:1: not JSON of Unicode text"),
        ('{"text": ""}', "bad.jsonl: all of its texts are empty"),
        ("[1]", "bad.jsonl:1: not an object"),
        ('{"text": "a", "text": "b"}', "the key 'text' occurs twice"),
        ('{"query": "a"}', "neither a text (text or page) nor a question"),
        ('{"query": "a", "choices": ["b"], "gold": 0}', "neither a text"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "2 is none of the 2 choices"),
        ('{"query": "a", "choices": ["b", "c"], "gold": true}', "True is none of the 2 choices"),
        ('{"query": "a", "choices": ["b", "c"], "answer": "D"}', "'D' is none"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 1.0}', "1.0 is none of the 2 choices"),
        ('{"query": "a", "choices": ["b", "c"], "gold": "9"}', "'9' is none of the 2 choices"),
        ('{"query": "a", "choices": ["4", "0"], "gold": "0"}', "bad.jsonl:1: '0' may mean each"),
        ('{"query": "a", "choices": [2, 1, 0], "gold": 2}', "2 may mean each of the choices 0, 2"),
        ('{"query": "a", "choices": ["B", "A"], "gold": "A"}', "'A' may mean each"),
        ('{"query": "a", "choices": ["b", "b"], "gold": "b"}', "'b' may mean each"),
        (
            '{"ctx": "a", "question": "b", "choices": ["b", "c"], "gold": 0}',
            "question and ctx differ",
        ),
        (
            '{"query": "a", "choices": ["b", "c"], "answer": 1, "label": 0}',
            "answer and label differ",
        ),
        ('{"text": "a", "question": "b", "choices": ["b", "c"], "gold": 0}', "both a text"),
        ('{"text": "a"}\n{"query": "a", "choices": ["b", "c"], "gold": 1}', "two files"),
        ("", "is empty"),
    ],
)
def test_a_bad_task_is_one_error_that_names_the_line(folder, tmp_path, capsys, line, says):
    (tmp_path / "bad.jsonl").write_text(line)
    assert main(["evaluate", str(folder), "--task", str(tmp_path / "bad.jsonl")]) == 78
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["sample", "--prompt", "a"], ["evaluate", "--task", "t.jsonl"]])
def test_a_folder_with_weights_that_are_not_finite_is_refused(folder, tmp_path, capsys, words):
    broken = shutil.copytree(folder, tmp_path / "broken")
    arrays = load_file(broken / "model.safetensors")
    arrays["model.norm.weight"][0] = np.nan
    save_file(arrays, broken / "model.safetensors")
    (tmp_path / "t.jsonl").write_text('{"text": "a"}')
    words = [str(tmp_path / word) if word == "t.jsonl" else word for word in words]
    assert main([words[0], str(broken), *words[1:]]) == 78
    assert "params/norm/scale have values that are not finite" in capsys.readouterr().err


def test_a_folder_whose_tokenizer_has_a_word_twice_is_refused(folder, tmp_path, capsys):
    broken = shutil.copytree(folder, tmp_path / "broken")
    fields = json.loads((broken / "tokenizer.json").read_bytes())
    fields["model"]["vocab"]["twice"] = 290
    (broken / "tokenizer.json").write_text(json.dumps(fields))
    assert main(["sample", str(broken), "--prompt", "a"]) == 78
    assert "'twice' have the id 290" in capsys.readouterr().err


def test_a_task_that_is_a_pipe_is_refused_and_not_waited_for(folder, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", "/dev/zero"):
        assert main(["evaluate", str(folder), "--task", str(path)]) == 78
        said = capsys.readouterr().err
        assert f"{path}: can't be read" in said
        assert "a pipe, a socket or a device" in said


def test_tasks_of_one_name_have_a_row_each_and_json_has_no_nan(folder, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "_task", lambda *_: {"acc": 1.0, "acc_stderr": math.nan})
    tasks = [word for name in ("a/x", "b/x", "y") for word in ("--task", f"{name}.jsonl")]
    assert main(["evaluate", str(folder), *tasks, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["scores"]
    assert list(scores) == ["a/x.jsonl", "b/x.jsonl", "y"]
    assert scores["y"] == {"acc": 1.0, "acc_stderr": None}


@pytest.mark.filterwarnings("error")
def test_a_set_without_weight_has_a_mean_that_is_no_number():
    nothing = jax.numpy.zeros(2)
    model = models.Model(lambda _: {}, {}, lambda *_: (nothing, nothing), None, 1.0)
    loaded = SimpleNamespace(model=model, params={}, model_state=None)
    rows = SimpleNamespace(rows=lambda ids: {"x": ids})
    assert math.isnan(evaluate._means(loaded, rows, 2, 2)["loss"])


def test_a_held_out_part_that_the_run_has_cut_elsewhere_is_refused(loaded, tmp_path, monkeypatch):
    write_tokens(tmp_path / "set", [[1] * 10, [2] * 990], vocab_size=9, tokenizer="mine")
    source = TokensSource(path=tmp_path / "set")
    config = SimpleNamespace(
        data=DataSection(source=source, seq_len=4),
        model=GptModel(num_layers=1, d_model=8, num_heads=1),
        guards=SimpleNamespace(bad_records=None),
        train=SimpleNamespace(max_rows_per_device=1),
    )
    monkeypatch.setattr(evaluate, "_means", lambda *_: {})
    monkeypatch.setattr(run_config, "newest_config", lambda _: config)
    recorded = open_tokens(tmp_path / "set").meta.fingerprint
    history = SimpleNamespace(newest=10, dataset=recorded)
    monkeypatch.setattr(run_log, "fold", lambda _: history)
    with pytest.raises(ConfigError, match="an earlier version of jaxres has started this run"):
        evaluate._sets(RunDir(tmp_path), loaded, SimpleNamespace(set=None, limit=1))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("sample", "MODEL", "--tokens", "0"), "--tokens must be from 1 to 2^63 - 1"),
        (("sample", "MODEL", "--tokens", "9" * 20), "--tokens must be from 1 to 2^63 - 1"),
        (("sample", "MODEL", "--samples", "0"), "--samples must be at least 1"),
        (("sample", "MODEL", "--temperature", "nan"), "--temperature must be at least 0"),
        (("sample", "MODEL", "--top-k", "0"), "--top-k must be at least 1"),
        (("sample", "MODEL", "--seed", "4294967296"), "--seed must be from 0 to 2^32 - 1"),
        (("sample", "MODEL", "--prompt", "\udcff"), "--prompt must be Unicode text"),
        (("sample", "MODEL", "--step", "last"), "--step last: must be a number"),
        (("evaluate", "MODEL"), "a folder has no validation sets; give --task"),
    ],
)
def test_a_wrong_option_is_named(folder, capsys, words, says):
    assert main([str(folder) if word == "MODEL" else word for word in words]) == 64
    assert says in capsys.readouterr().err


def test_a_prompt_of_bytes_that_are_no_text_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert main(["sample", str(folder), "--prompt", "-"]) == 64
    assert "--prompt -: standard input is not text" in capsys.readouterr().err


def test_wrong_arguments_and_tokens_are_refused_from_python(loaded):
    for given in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"seed": 2**32}):
        with pytest.raises(ConfigError, match=f"{next(iter(given))} must be"):
            loaded.sample("x", tokens=1, **given)
    for wrong in (ROWS, -1, 2**40):
        with pytest.raises(ConfigError, match=f"token ids must be from 0 to {ROWS - 1}"):
            loaded.logits([[wrong] * 24])


def test_too_many_texts_for_the_memory_are_exit_86(folder, capsys):
    assert main(["sample", str(folder), "--tokens", "100000000000", "--temperature", "0"]) == 86
    assert "not enough memory" in capsys.readouterr().err


def test_adapters_and_unknown_settings_are_named(folder, tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["sample", str(tmp_path)]) == 78
    assert "holds adapters only" in capsys.readouterr().err
    yarn = families.CONFIGS["llama"] | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    shutil.copytree(folder, tmp_path / "yarn")
    families.write_config(tmp_path / "yarn", yarn)
    assert main(["sample", str(tmp_path / "yarn")]) == 78
    said = capsys.readouterr().err
    assert "can't compute" in said
    assert "yarn" in said
    assert "init_from" not in said


NOT_FINITE = models.Model(
    lambda _: {}, {}, lambda *_: None, lambda _, x: jax.numpy.full((*x.shape, 9), np.nan), 1.0
)


@pytest.mark.parametrize("temperature", slow_but([0.0, 1.0], 1.0))
def test_no_token_is_drawn_from_logits_that_are_no_numbers(loaded, temperature):
    sampling = Sampling(temperature=temperature)
    with pytest.raises(ConfigError, match="no token can be drawn"):
        list(generate(NOT_FINITE, {}, [1], count=2, seq_len=4, sampling=sampling))
    params = jax.tree.map(lambda array: array * np.nan, loaded.params)
    with pytest.raises(ConfigError, match="no token can be drawn"):
        replace(loaded, params=params).sample("def ", tokens=6, temperature=temperature)


def test_choices_longer_than_a_row_are_counted(loaded):
    uniform = text_scores.Likelihood(
        lambda _, tokens_BT: jax.numpy.zeros((*tokens_BT.shape, ROWS)), {}, seq_len=4
    )
    questions = [text_scores.Question("a", ("b", "import os, sys, math"), 0)]
    scores = text_scores.score_choices(questions, loaded.tokenizer, uniform)
    assert scores["cut_choices"] == 1
    short = [text_scores.Question("a", ("b", "c"), 0)]
    assert "cut_choices" not in text_scores.score_choices(short, loaded.tokenizer, uniform)


def test_no_choice_is_right_if_probabilities_are_no_numbers():
    measure = text_scores.Likelihood(NOT_FINITE.logits, {}, seq_len=4)
    with pytest.raises(ConfigError, match="texts have no probability"):
        list(measure.of_rows([([1, 2], 1)]))


def test_a_folder_computes_in_float32(loaded, folder):
    model = weights_export.of_folder(folder)[1].model_copy(update={"compute_dtype": "float32"})
    built = models.build(model, vocab_size=None, seq_len=24, platform="cpu")
    tokens = np.arange(24)[None]
    np.testing.assert_array_equal(
        loaded.logits(tokens), jax.jit(built.logits)(loaded.params, tokens.astype(np.int32))
    )


@pytest.mark.slow
def test_the_command_prints_the_prompt_and_the_text_as_it_is_drawn(folder, loaded, capsys):
    assert main(["sample", str(folder), "--prompt", "é = ", "--tokens", "9", "--seed", "7"]) == 0
    text = escaped(loaded.sample("é = ", tokens=9, seed=7)[0])
    assert capsys.readouterr().out == f"é = {text}\n"
