"""init_from takes the exact weights, on any mesh; the same at every start and on all hosts."""

import dataclasses
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

from jaxres import config as configs
from jaxres import data
from jaxres.checkpoint.weights import export as weights_export
from jaxres.checkpoint.weights import source as weights_source
from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.clock import SystemClock
from jaxres.cluster.host_group import HostRank, SingleHost
from jaxres.config import RunConfig
from jaxres.config.schema.data import HuggingfaceTokenizer
from jaxres.config.schema.training import FromRun, FromSafetensors
from jaxres.data.tokens.tokenizer import BYTES, open_tokenizer
from jaxres.engine import mesh as meshes
from jaxres.engine import mesh_plan
from jaxres.faults import ConfigError
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, RunHistory, RunLog, Start
from jaxres.telemetry.observers import Observers
from jaxres.train import init_params
from jaxres.train.compiled import assemble
from jaxres.train.context import AttemptContext
from tests import bpe
from tests.unit.checkpoint import llama_run
from tests.unit.checkpoint.llama_run import flat, random_params, run_of
from tests.unit.runlog.example_records import CLAIM


@dataclass
class FollowerHost(SingleHost):
    """A host that reads fixed messages of host 0."""

    messages: dict[str, str]
    member: HostRank = field(default_factory=lambda: HostRank(1, 2, "x:1"))

    def broadcast(self, topic, decide, *, seconds):
        return self.messages[topic]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text("something to learn from\n" * 200)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run with two steps and its export."""
    config = llama_run.config(tie_embeddings=False)
    params = random_params(config.model)
    root = tmp_path_factory.mktemp("source") / "run"
    run_of(root, config, params, steps=(4, 8))
    record_tokenizer(root, BYTES)
    assert checkpoints_cli.main(["checkpoints", "export", str(root)], usage="") == 0
    return root, flat(params)


def record_tokenizer(root, name):
    log = RunDir(root).log
    start = Start(step=8, path=None, dataset="d", computation={}, tokenizer=name)
    RunLog.claim(log, CLAIM, after=run_log.read_records(log), clock=SystemClock()).append(start)


def parts_of(corpus, tmp_path, *, mesh=None, model=None, **init_from):
    config = RunConfig.model_validate_json(
        json.dumps(
            {
                "data": {
                    "source": {"kind": "text", "path": str(corpus)},
                    "seq_len": llama_run.T,
                    "heldout_fraction": 0,
                    "cache_dir": str(tmp_path / "cache"),
                },
                "model": model or {"kind": "gpt", **llama_run.SIZES, "tie_embeddings": False},
                "mesh": mesh or {},
                "train": {"steps": 8, "global_batch_size": 8},
                "init_from": init_from or {"kind": "seed"},
            }
        )
    )
    devices = jax.devices()[: 8 if mesh else 1]
    plan = mesh_plan.plan(
        config.mesh, config.train, config.model, num_devices=len(devices), num_hosts=1
    )
    return assemble.components(
        config,
        data.open_dataset(config.data),
        plan=plan,
        mesh=meshes.build(config.mesh, devices=devices),
        platform="cpu",
    )


@pytest.fixture(scope="module")
def fresh(corpus, tmp_path_factory):
    """The state that the seed alone makes, on one device; it compiles slowly."""
    return parts_of(corpus, tmp_path_factory.mktemp("fresh")).init()


def context_at(tmp_path, peers=None):
    run_dir = RunDir(tmp_path / "run")
    if run_dir.log.exists():
        shutil.rmtree(run_dir.log)
    log = RunLog.claim(run_dir.log, CLAIM, after=[], clock=SystemClock())
    events = []
    context = AttemptContext(
        run_dir,
        log,
        CLAIM,
        events.append,
        SystemClock(),
        observers=Observers(),
        requests=None,  # type: ignore[arg-type] # No requests here.
        peers=peers or SingleHost(),
    )
    return context, events


def started(parts, context, history=None):
    init = init_params.build(parts.config.init_from, parts, context)
    return init(history or RunHistory())


def bits(state):
    return {path: (x.shape, x.tobytes()) for path, x in flat(state.params).items()}


@pytest.mark.slow
def test_parameters_of_another_run_are_bit_exact_on_another_mesh(corpus, tmp_path, source):
    root, arrays = source
    where = {"kind": "run", "path": str(root)}
    parts = parts_of(corpus, tmp_path, mesh={"data": 2, "fsdp": 2, "tensor": 2}, **where)
    context, events = context_at(tmp_path)
    state, origin = started(parts, context)
    assert bits(state) == {path: (x.shape, x.tobytes()) for path, x in arrays.items()}
    laid = jax.tree.map(lambda x: x.sharding, state)
    assert laid == jax.tree.map(lambda x: x.sharding, parts.shapes), (
        "each array is sharded as in training"
    )
    assert not state.params["blocks"]["attention"]["query"].is_fully_replicated
    params = weights_export.of_run(
        weights_source.from_run(RunDir(root), parts.config, committed(root))
    )
    assert origin == {"params": weights_export.digest_of(params), "path": str(root), "step": "8"}
    assert "12 arrays from" in str(events[-1])


def committed(root):
    return weights_source.committed(RunDir(root), step=None)


@pytest.mark.slow
def test_parameters_of_a_checkpoint_of_stock_orbax_are_bit_exact(corpus, tmp_path, fresh):
    params = jax.tree.map(lambda x: np.asarray(x) + 1, fresh.params)
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        tree = {"model": params, "opt_state": {"mu": params}, "step": 3}
        manager.save(3, args=ocp.args.StandardSave(tree))
    where = {
        "kind": "orbax",
        "path": str(tmp_path / "manager" / "3"),
        "rename": {"model": "params"},
    }
    with pytest.raises(ConfigError, match=r"opt_state/mu/head: float32\[.*\], expected absent"):
        started(parts_of(corpus, tmp_path, **where), context_at(tmp_path)[0])
    parts = parts_of(corpus, tmp_path, **where, allow_extra=["opt_state/*", "step"])
    context, events = context_at(tmp_path)
    state, origin = started(parts, context)
    assert "has no tokenizer beside it: its tokens are taken for bytes" in str(events)
    assert bits(state) == {path: (x.shape, x.tobytes()) for path, x in flat(params).items()}
    assert origin.keys() == {"params", "path"}


@pytest.mark.slow
def test_all_but_the_parameters_equals_a_start_from_the_seed(corpus, tmp_path, source, fresh):
    where = {"kind": "safetensors", "path": str(next((source[0] / "exports").iterdir()))}
    parts = parts_of(corpus, tmp_path, **where)
    state, _ = started(parts, context_at(tmp_path)[0])
    assert bits(state) == {path: (x.shape, x.tobytes()) for path, x in source[1].items()}
    same = jax.tree.map(
        lambda a, b: np.array_equal(a, b),
        (state.opt, state.key, state.step),
        (fresh.opt, fresh.key, fresh.step),
    )
    assert jax.tree.all(same)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, fresh)


@pytest.mark.slow
def test_arrays_that_may_be_missing_are_initialised_from_the_seed(corpus, tmp_path, source, fresh):
    where = {"kind": "run", "path": str(source[0]), "rename": {"params/head": "params/old"}}
    with pytest.raises(ConfigError, match="params/head"):
        started(parts_of(corpus, tmp_path, **where), context_at(tmp_path)[0])
    allowed = {"allow_missing": ["params/head"], "allow_extra": ["*/head"]}
    parts = parts_of(corpus, tmp_path, **where, **allowed)
    state, _ = started(parts, context_at(tmp_path)[0])
    taken, drawn = bits(state), bits(fresh)
    assert [path for path in taken if taken[path] == drawn[path]] == ["params/head"]


@pytest.mark.slow
def test_a_restart_takes_the_same_step_of_a_source_that_has_newer_ones(corpus, tmp_path, source):
    root, arrays = source
    parts = parts_of(corpus, tmp_path, kind="run", path=str(root))
    context, _ = context_at(tmp_path)
    four = parts_of(corpus, tmp_path, kind="run", path=str(root), at_step=4)
    state, origin = started(four, context)
    context.log.append(Start(step=0, path=None, dataset="d", computation={}, init=origin))
    again, same = started(parts, context, context.log.history())
    assert (bits(again), same) == (bits(state), origin)
    half = arrays["params/norm/scale"] / 2
    assert np.array_equal(np.asarray(again.params["norm"]["scale"]), half)


def test_other_weights_than_at_the_first_start_are_refused(corpus, tmp_path, source):
    folder = tmp_path / "folder"
    shutil.copytree(next((source[0] / "exports").iterdir()), folder)
    parts = parts_of(corpus, tmp_path, kind="safetensors", path=str(folder))
    context, _ = context_at(tmp_path)
    _, origin = started(parts, context)
    context.log.append(Start(step=0, path=None, dataset="d", computation={}, init=origin))
    assert started(parts, context, context.log.history())[1] == origin

    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x3f")
    with pytest.raises(ConfigError, match=r"other numbers than jaxres\.json records"):
        started(parts, context, context.log.history())
    (folder / "jaxres.json").unlink()
    with pytest.raises(
        ConfigError, match="not the weights that this run was started with"
    ) as error:
        started(parts, context, context.log.history())
    assert str(folder) in str(error.value)
    assert origin["params"] in str(error.value)


@pytest.mark.slow
def test_a_host_that_reads_other_weights_than_host_0_is_refused(corpus, tmp_path, source):
    parts = parts_of(corpus, tmp_path, kind="run", path=str(source[0]))
    _, origin = started(parts, context_at(tmp_path)[0])
    messages = {"init/step": "8", "init/0": origin["params"]}
    assert started(parts, context_at(tmp_path, FollowerHost(messages))[0])[1] == origin
    messages = {"init/step": "4", "init/0": origin["params"]}
    with pytest.raises(ConfigError, match="other weights than host 0"):
        started(parts, context_at(tmp_path, FollowerHost(messages))[0])


class KeptOnce(SingleHost):
    """Host 0, whose messages can be set once, as those of a job's key-value store."""

    def __init__(self):
        super().__init__()
        self.topics = []

    def broadcast(self, topic, decide, *, seconds):
        assert topic not in self.topics, f"{topic}: sent twice"
        self.topics.append(topic)
        return decide()


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_rollback_to_step_0_takes_the_weights_again(corpus, tmp_path, source, is_committed):
    """Of an attempt that began at step 0, or with a step that the rollback has discarded."""
    parts = parts_of(corpus, tmp_path, kind="run", path=str(source[0]))
    context, _ = context_at(tmp_path, KeptOnce())
    if is_committed:
        _, origin = started(parts, context_at(tmp_path)[0])
        context, _ = context_at(tmp_path, KeptOnce())
        context.log.append(Start(step=0, path=None, dataset="d", computation={}, init=origin))
        context.log.append(Commit(step=8, path="checkpoints/x", manifest="m", bytes=1))
        context.run_dir.attempt(1).mkdir(parents=True, exist_ok=True)
        config = context.run_dir.attempt(1) / "config.yaml"
        config.write_text(configs.dump_yaml(parts.config))
    init = init_params.build(parts.config.init_from, parts, context)
    states = [init(RunHistory())[0] for _ in range(2)]
    assert bits(states[0]) == bits(states[1])
    assert bits(states[0]) == {path: (x.shape, x.tobytes()) for path, x in source[1].items()}


@pytest.mark.slow
def test_after_the_first_commit_moved_weights_are_compared_and_may_be_gone(
    corpus, tmp_path, source
):
    folder = next((source[0] / "exports").iterdir())
    first = parts_of(corpus, tmp_path, kind="safetensors", path=str(folder))
    context, events = context_at(tmp_path)
    _, origin = started(first, context)
    run_dir = context.run_dir
    run_dir.attempt(1).mkdir(parents=True, exist_ok=True)
    (run_dir.attempt(1) / "config.yaml").write_text(configs.dump_yaml(first.config))
    context.log.append(Start(step=0, path=None, dataset="d", computation={}, init=origin))
    context.log.append(Commit(step=8, path="checkpoints/x", manifest="m", bytes=1))

    def resumed(path):
        events.clear()
        parts = parts_of(corpus, tmp_path, kind="safetensors", path=str(path))
        init_params.build(parts.config.init_from, parts, context)
        return " ".join(map(str, events))

    assert resumed(folder) == "", "the weights are not read"
    shutil.copytree(folder, tmp_path / "moved")
    assert "params/" in resumed(tmp_path / "moved")
    assert f"started from {folder}" in resumed(tmp_path / "gone")

    other = tmp_path / "moved" / "model.safetensors"
    other.write_bytes(other.read_bytes()[:-1] + b"\x3f")
    (tmp_path / "moved" / "jaxres.json").unlink()
    with pytest.raises(ConfigError, match="not the weights that this run was started with"):
        resumed(tmp_path / "moved")


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ({"kind": "safetensors", "path": "/nowhere"}, "/nowhere: no such file"),
        ({"kind": "safetensors", "path": "{corpus}"}, "there are none"),
        ({"kind": "run", "path": "/nowhere"}, "/nowhere: no run here"),
        ({"kind": "orbax", "path": "/nowhere"}, "/nowhere: no checkpoint of Orbax here"),
        (
            {"kind": "run", "path": "{run}", "at_step": 5},
            "step 5 is not committed (committed: 4,",
        ),
    ],
)
def test_an_unusable_source_is_refused_before_anything_is_compiled(
    corpus, tmp_path, source, where, text
):
    where["path"] = where["path"].format(corpus=corpus, run=source[0])
    parts = parts_of(corpus, tmp_path, **where)
    with pytest.raises(ConfigError) as error:
        init_params.build(parts.config.init_from, parts, context_at(tmp_path)[0])
    assert str(error.value).startswith("init_from.path: ")
    assert text in str(error.value)


def test_a_damaged_source_is_a_config_error_of_this_run(corpus, tmp_path, source):
    root = tmp_path / "copy"
    shutil.copytree(source[0], root)
    commit = committed(root)
    (root / commit.path / "progress.json").unlink()
    parts = parts_of(corpus, tmp_path, kind="run", path=str(root))
    with pytest.raises(ConfigError, match=r"init_from\.path: .*progress\.json is missing"):
        init_params.build(parts.config.init_from, parts, context_at(tmp_path)[0])


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_the_name_of_their_tensor(
    corpus, tmp_path, source, value
):
    """Also in a row of the embedding that no text uses."""
    folder = shutil.copytree(next((source[0] / "exports").iterdir()), tmp_path / "folder")
    (folder / "jaxres.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    weights = tensors[EMBEDDING].copy()
    weights[-1, :3] = value
    save_file(tensors | {EMBEDDING: weights}, folder / "model.safetensors")
    parts = parts_of(corpus, tmp_path, kind="safetensors", path=str(folder))
    with pytest.raises(ConfigError) as error:
        started(parts, context_at(tmp_path)[0])
    assert str(error.value).startswith(f"init_from.path: {folder}: 3 of {weights.size:,} values of")
    assert f"values of {EMBEDDING} are not finite" in str(error.value)


def broken_model(*, value, vocab_size, seq_len):
    """A model with two arrays, of which one has a value of the test twice."""
    values = [1.0, float(value), float(value), 2.0]

    def init(key):
        return {"a": jnp.ones(3), "b": {"c": jnp.asarray(values)}}

    def loss(params, batch, key):
        loss_B = jnp.ones(batch["tokens_BT"].shape[0])
        return loss_B * params["a"].sum(), loss_B

    return SimpleNamespace(init=init, loss=loss)


@pytest.mark.parametrize("value", ["0.5", "inf"])
def test_a_users_model_that_begins_with_values_that_are_not_finite_is_refused(
    corpus, tmp_path, value
):
    target = f"{__name__}:broken_model"
    model = {"kind": "custom", "target": target, "args": {"value": value}}
    parts = parts_of(corpus, tmp_path, model=model)
    if value == "0.5":
        state, origin = started(parts, context_at(tmp_path)[0])
        assert (state.params["b"]["c"].tolist(), origin) == ([1.0, 0.5, 0.5, 2.0], None)
        return
    with pytest.raises(ConfigError, match=r"2 of 4 values of params/b/c are not finite"):
        started(parts, context_at(tmp_path)[0])


@pytest.mark.slow
def test_weights_of_another_tokenizer_are_refused_or_accepted_by_name(corpus, tmp_path, source):
    root, _ = source
    (export,) = (root / "exports").iterdir()
    other = open_tokenizer(HuggingfaceTokenizer(path=bpe.train(tmp_path / "tokenizer")))
    copied = shutil.copytree(root, tmp_path / "copy")
    record_tokenizer(copied, other.name)
    cases = [
        ({"kind": "safetensors", "path": str(export)}, other),
        ({"kind": "run", "path": str(copied)}, None),
    ]
    for where, tokenizer in cases:
        for allowed in ((), ("tokenizer",)):
            parts = parts_of(corpus, tmp_path, **where, allow_changed=allowed)
            if tokenizer is not None:
                named = {"tokenizer": tokenizer, "tokenizer_names": (tokenizer.name,)}
                dataset = dataclasses.replace(parts.dataset, **named)
                parts = dataclasses.replace(parts, dataset=dataset)
            context, _ = context_at(tmp_path)
            if allowed:
                started(parts, context)
                continue
            with pytest.raises(ConfigError, match="another tokenizer than the data"):
                started(parts, context)


@pytest.mark.slow
def test_tokens_that_only_a_name_identifies_are_compared_with_the_tokenizer_of_weights(
    tmp_path, source, monkeypatch
):
    root, _ = source
    monkeypatch.setenv("HOME", str(tmp_path))
    trained = bpe.train(tmp_path / "tokenizer")
    name = open_tokenizer(HuggingfaceTokenizer(path=trained)).name
    other_end = open_tokenizer(
        HuggingfaceTokenizer(path=trained, end_of_document="a", special_tokens="control")
    ).name
    copied = shutil.copytree(root, tmp_path / "copy")
    record_tokenizer(copied, name)
    weights = shutil.copytree(next((root / "exports").iterdir()), tmp_path / "weights")
    bare = shutil.copytree(weights, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    shutil.copy(trained / "tokenizer.json", weights / "tokenizer.json")

    def told(tokens, kind, path, **more):
        fields = {"path": path, **more}
        section = FromRun(**fields) if kind == "run" else FromSafetensors(**fields)
        dataset = SimpleNamespace(tokenizer=None, tokenizer_names=(tokens,))
        return init_params.check_tokenizer(section, dataset)

    known = (("run", copied), ("safetensors", weights))
    for kind, path in known:
        for given in (path, Path("~") / path.name):
            assert told(name, kind, given) is None
            with pytest.raises(ConfigError, match="another tokenizer than the data"):
                told("huggingface:0123", kind, given)
    assert other_end != name
    assert told(other_end, "safetensors", weights) is None, "only the end of documents differs"
    for tokens, kind, path in (("mine", *known[0]), ("ids", *known[1]), (name, known[1][0], bare)):
        assert "is not known. Give the tokenizer of the data" in told(tokens, kind, path)
        assert told(tokens, kind, path, allow_changed=("tokenizer",)) is None


@pytest.mark.slow
def test_a_run_of_unknown_tokens_is_not_trained_on_unchosen_bytes(corpus, tmp_path, source):
    copied = shutil.copytree(source[0], tmp_path / "copy")
    record_tokenizer(copied, None)
    where = {"kind": "run", "path": str(copied)}
    with pytest.raises(ConfigError, match="has not recorded the tokenizer"):
        started(parts_of(corpus, tmp_path, **where), context_at(tmp_path)[0])
    chosen = parts_of(corpus, tmp_path, **where, allow_changed=["tokenizer"])
    assert bits(started(chosen, context_at(tmp_path)[0])[0])
    other = open_tokenizer(HuggingfaceTokenizer(path=bpe.train(tmp_path / "tokenizer")))
    parts = parts_of(corpus, tmp_path, **where)
    parts = dataclasses.replace(
        parts, dataset=dataclasses.replace(parts.dataset, tokenizer=other, tokenizer_names=("x",))
    )
    assert bits(started(parts, context_at(tmp_path)[0])[0]), "a tokenizer with a path was chosen"
