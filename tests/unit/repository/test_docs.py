"""README and docs: every path exists, every command parses, every folder and term is listed."""

import ast
import contextlib
import functools
import io
import re
import shlex
import sys
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from jaxres import __main__ as jaxres_command
from jaxres import config as configs
from jaxres import inference
from jaxres.cli import branch, chaos, plan, resume_check, runs, sweep
from jaxres.cli import data as data_command
from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.cluster import detect
from jaxres.config.schema.data import Source
from jaxres.config.schema.gce import CapacityOption
from jaxres.config.schema.model import CustomModel
from jaxres.faults import UsageError
from jaxres.jax_cli import doctor, replay
from jaxres.launch import local
from jaxres.launch.gce import command as gce
from jaxres.launch.k8s import command as k8s
from jaxres.launch.sky import command as sky
from jaxres.launch.slurm import command as slurm
from jaxres.models import custom
from jaxres.supervisor.run_config import parse_target
from tests.emulators import kubernetes, skypilot
from tests.unit.checkpoint import families
from tools import module_tables
from tools.mutants.tables import read_all

ROOT = Path(__file__).parents[3]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*DOCS, ROOT / "tests/promises/README.md"]
PLACEHOLDERS: dict[str, str] = {
    "my.yaml": "tests/promises/tiny.yaml",
    "images.yaml": "tests/promises/images.yaml",
    "CONFIG.yaml": "configs/quickstart.yaml",
    "CONFIG": "configs/quickstart.yaml",
    "TRY.yaml": "configs/quickstart.yaml",
}
IGNORED_BY_THE_SHELL = re.compile(r"\$\([^)]*\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GCE_CONFIG = """\
base: {base}
run: {{dir: gs://bucket/runs/first}}
launch:
  gce:
    project: project
    num_hosts: 1
    image: projects/p/global/images/family/f
    runtime: {{kind: container, image: i}}
    subnetworks: ["regions/{{region}}/subnetworks/default"]
    service_account: trainer@project.iam.gserviceaccount.com
    capacity_options:
      - {{kind: spot, zones: [us-central1-a], machine_type: a3-highgpu-8g, dollars_per_hour: 25.0}}
"""


def _commands() -> Iterator[tuple[str, list[str]]]:
    """Yields the page and the arguments of every command of jaxres or pytest in a bash block."""
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text()):
            if language not in ("bash", "sh"):
                continue
            for line in block.replace("\\\n", " ").splitlines():
                for part in line.split("&&"):
                    words = shlex.split(IGNORED_BY_THE_SHELL.sub("X", part), comments=True)
                    if command := _command(words):
                        yield str(page.relative_to(ROOT)), command


def test_a_tool_that_the_docs_start_by_its_path_finds_the_tests_that_it_uses() -> None:
    """Python adds the folder of a script to its path, not the one that it is started in."""
    texts = [page.read_text() for page in PAGES]
    tools = {name for text in texts for name in re.findall(r"python (tools/[\w/]+\.py)", text)}
    assert len(tools) > 10
    for name in sorted(tools):
        code = (ROOT / name).read_text()
        path, found = code.find("sys.path.insert"), re.search("^from (tests|tools)", code, re.M)
        assert found is None or -1 < path < found.start(), f"{name} imports {found[1]}"


def _command(words: list[str]) -> list[str]:
    """Returns ["jaxres", verb, ...], ["pytest", ...] or []: how the line calls them."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[:1] == ["jaxres"]:
        return words
    if not words or not words[0].endswith("python") or words[1:2] != ["-m"]:
        return []
    module, *rest = words[2:]
    if module == "pytest":
        return ["pytest", *rest]
    if module == "jaxres":
        return ["jaxres", *rest]
    return ["jaxres", module.removeprefix("jaxres."), *rest] if module.startswith("jaxres.") else []


COMMANDS = list(_commands())


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[" ".join(c) for _, c in COMMANDS])
def test_every_command_in_the_docs_is_accepted_by_its_parser(
    page: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    program, *words = (PLACEHOLDERS.get(w, w.replace("BUCKET", "bucket")) for w in command)
    if program == "pytest":
        _check_pytest(words)
    elif words[0] == "train":
        _check_training(words[1:], tmp_path)
    elif words[:2] == ["launch", "local"]:
        _check_local(words[2:], tmp_path)
    elif words[:2] == ["launch", "slurm"]:
        _check_slurm(words[2:], tmp_path)
    elif words[:2] == ["launch", "k8s"]:
        _check_k8s(words[2:])
    elif words[:2] == ["launch", "sky"]:
        skypilot.check(yaml.safe_load(_printed(lambda: sky.main(_unredirected(words[2:]), env={}))))
    elif words[:2] == ["launch", "gce"]:
        _check_gce(words[2:], tmp_path, monkeypatch)
    elif words[0] == "doctor":
        options = doctor._parse(words[1:])
        configs.load(options.config, options.overrides)
    elif words[0] == "chaos":
        options = chaos._parse(words[1:])
        configs.load(options.config, options.overrides)
    elif words[0] == "resume-check":
        options = resume_check._parse(words[1:])
        configs.load(options.config, options.overrides)
    elif words[0] == "plan":
        options = plan._parse(words[1:])
        plan._config(options.words)
    elif words[0] == "data":
        _check_target(data_command._parser().parse_known_args(words[1:])[1], tmp_path)
    elif words[0] == "sweep":
        monkeypatch.setattr(sweep.Sweep, "run", lambda self: 0)
        words += ["--to", str(tmp_path / "sweep")]
        assert jaxres_command.main(words) == 0
    elif words[0] in ("sample", "evaluate"):
        monkeypatch.setattr(inference, "load", lambda path, step: _ended())
        with contextlib.suppress(_Ended):
            assert jaxres_command.main(words) == 0
    elif words[0] in ("runs", "compare", "branch"):
        _check_runs(words, monkeypatch)
    elif words[0] == "replay":
        monkeypatch.setattr(replay.StepReplay, "lines", lambda self, *, explain: iter(()))
        assert replay.main(words[1:]) == 0
    elif words[0] in ("faults", "exit_codes"):
        assert (ROOT / "jaxres" / f"{words[0]}.py").exists()
    else:
        checkpoints_cli._parse(words, usage=jaxres_command.USAGE)


def _check_runs(words, monkeypatch):
    """Runs the command up to where it would read or write a run."""
    monkeypatch.setattr(runs, "read_rows", lambda folder, clock: [])
    monkeypatch.setattr(runs, "compare", lambda run_dirs: _ended())
    quickstart = ROOT / "configs/quickstart.yaml"
    load = lambda origin, to, **given: str(configs.load(quickstart, given["overrides"]))  # noqa: E731
    monkeypatch.setattr(branch, "branch", load)
    with contextlib.suppress(_Ended):
        assert jaxres_command.main(words) == 0


class _Ended(BaseException):
    """Ends a command of which only the arguments are checked."""


def _ended():
    raise _Ended


def _check_pytest(words):
    paths = [word for word in words if "/" in word]
    assert all((ROOT / path.partition("::")[0]).exists() for path in paths)


def _check_training(words, tmp_path):
    if "--help" in words:
        return
    flags, words = detect.split_flags(words)
    assert not flags or detect.detect_cluster(flags, {})[1] is not None
    _check_target([word for word in words if word != "--inline"], tmp_path)


def _check_local(words, tmp_path):
    options = local.parse(words)
    _check_target([str(options.target), *options.overrides], tmp_path)


def _check_slurm(words, tmp_path):
    """Parses a submission; the other commands are run up to where they find no job."""
    if words[0] in ("status", "logs", "stop"):
        with pytest.raises(UsageError, match="no job of `launch slurm`"):
            slurm.main(words, env={})
    else:
        _check_target(list(slurm._parse(words).arguments), tmp_path)


def _check_k8s(words):
    """Prints the manifest, as far as the shell's redirection."""
    words = _unredirected(words)
    assert "--print" in words
    for manifest in yaml.safe_load_all(_printed(lambda: k8s.main(words, env={}))):
        kubernetes.check(manifest)


def _unredirected(words):
    return words[: words.index(">")] if ">" in words else words


def _printed(command):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert command() == 0
    return out.getvalue()


def _check_target(words, tmp_path):
    """Loads the config with the overrides; a run directory's are those of the quickstart."""
    families.write_config(tmp_path, families.CONFIGS["qwen3"])
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    words = [re.sub(r"(?<=path=)MODEL|(?<=path: )MODEL", str(tmp_path), word) for word in words]
    target, overrides = parse_target(words, command="")
    path = Path(str(target))
    configs.load(path if path.suffix == ".yaml" else ROOT / "configs/quickstart.yaml", overrides)


def _check_gce(words, tmp_path, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text(GCE_CONFIG.format(base=ROOT / "configs/quickstart.yaml"))
    words = [str(config) if word == "configs/quickstart.yaml" else word for word in words]
    called = []
    record = lambda name: lambda *args, **kwargs: called.append(name) or 0  # noqa: E731
    monkeypatch.setattr(gce.preflight, "show", record("up"))
    monkeypatch.setattr(gce.preflight, "show_checks", record("up"))
    monkeypatch.setattr(gce, "compute_for", lambda *_: None)
    monkeypatch.setattr(gce.bucket_setup, "init_bucket", record("init"))
    monkeypatch.setattr(gce.gce_status, "show_status", record("status"))
    monkeypatch.setattr(gce.gce_check, "check", record("check"))
    for function, name in (
        ("_up", "up"),
        ("_request_end", words[0]),
        ("_down", "down"),
        ("_logs", "logs"),
        ("_command_on_vm", words[0]),
    ):
        monkeypatch.setattr(gce, function, record(name))
    assert gce.main(words, env={}) == 0
    assert called == [words[0]]


def test_a_command_with_an_unknown_flag_is_not_accepted():
    with pytest.raises(UsageError), contextlib.redirect_stderr(io.StringIO()):
        checkpoints_cli._parse(["status", "RUN_DIR", "--jsn"], usage=jaxres_command.USAGE)


def test_there_are_commands_of_every_kind():
    kinds = {tuple(command[:2]) for _, command in COMMANDS}
    wanted = ("train", "launch", "status", "history", "checkpoints", "replay", "doctor", "data")
    assert {("jaxres", verb) for verb in wanted} <= kinds


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_and_path_of_a_page_exists(page):
    text = FENCE.sub("", page.read_text())
    links = [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    missing = [link for link in links if not _exists(page, link)]
    paths = re.findall(r"(?<![\w./])(?:jaxres|emulators|tests|tools|docs|configs)/[\w./-]+\w", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    for path in re.findall(r"`(\w+/[\w/]*\w\.py)`", text):  # As in jaxres/, or as in tests/.
        homes = (ROOT, ROOT / "jaxres", ROOT / "tests")
        missing += [] if any((home / path).exists() for home in homes) else [path]
    assert not missing


def _exists(page: Path, link: str) -> bool:
    """Tells whether the file of a link exists, and its heading where one is named."""
    name, _, heading = link.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not heading:
        return path.exists()
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return heading in [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]


def test_the_map_lists_every_page():
    text = (ROOT / "docs/README.md").read_text()
    names = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in names if f"({name})" not in text} == set()


ADR_HEADS = ["Context", "Decision", "Given up", "Undo"]
ADRS = {int(path.name[:4]): path for path in sorted((ROOT / "docs/adr").glob("*.md"))}


@pytest.mark.parametrize("number", ADRS)
def test_an_adr_has_a_status_and_the_uniform_form(number):
    lines = ADRS[number].read_text().splitlines()
    assert lines[0].startswith(f"# {number}. ")
    (status,) = (line for line in lines if line.startswith("Status:"))
    replaced = re.fullmatch(r"Status: (?:accepted|withdrawn|superseded by (\d+))", status)
    assert replaced, f"{status}: not accepted, withdrawn or superseded by a number"
    if status == "Status: withdrawn":
        assert len(lines) <= 10
        return
    if replaced[1]:
        assert len(lines) <= 10
        assert f"Supersedes: {number}" in ADRS[int(replaced[1])].read_text().splitlines()
        return
    assert len(lines) <= 60
    heads = [head for line in lines for head in re.findall(r"^\*\*(.+?)\.\*\*", line)]
    assert heads == ADR_HEADS
    for line in lines:
        for earlier in re.findall(r"^Supersedes: (\d+)$", line):
            text = ADRS[int(earlier)].read_text()
            assert f"Status: superseded by {number}" in text.splitlines()


@pytest.mark.parametrize("name", module_tables.PAGES)
def test_the_generated_tables_of_a_page_are_those_of_the_code(name):
    text = (ROOT / "docs" / name).read_text()
    assert text == module_tables.with_parts(text, where=name), "run tools/golden.py"


def test_the_tables_list_each_folder_and_module_with_its_docstring():
    folders, modules = module_tables.folders(), module_tables.modules()
    for path in (ROOT / "jaxres").rglob("*.py"):
        name = path.relative_to(ROOT)
        row = f"| `{name.parent}/` |" if path.name == "__init__.py" else f"| `{name}` |"
        table = folders if path.name == "__init__.py" else modules
        assert table.count(f"{row} {module_tables.first_line(path)} |") == 1
    order = [folders.index(f"`jaxres/{name}/`") for name in ("cli", "train", "engine", "storage")]
    assert order == sorted(order)


@pytest.mark.parametrize("text", ["no table", "<!-- generated: modulse -->\n\n<!-- end -->"])
def test_a_page_with_a_misspelt_table_or_without_one_is_refused(text):
    with pytest.raises(
        ValueError, match=r"docs/page.md has .*; known parts: assumptions, covered-faults"
    ):
        module_tables.with_parts(text, where="page.md")


def test_a_module_without_a_docstring_is_refused(tmp_path):
    (tmp_path / "late.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"late\.py: a module needs a docstring"):
        module_tables.first_line(tmp_path / "late.py")


def test_the_readme_has_at_most_120_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_extra_of_the_launcher_for_vms_can_read_its_bucket():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "jaxres[gcs]" in extras["optional-dependencies"]["gce"]


def test_every_glossary_term_is_in_use_and_in_order():
    page = ROOT / "docs/ARCHITECTURE.md"
    before, _, rest = page.read_text().partition("\n## Glossary\n")
    glossary, _, after = rest.partition("\n## ")
    entries = re.findall(r"^- \*\*(.+?)\*\*: ", glossary, re.M)
    assert entries
    assert entries == sorted(entries, key=str.lower)
    others = [path for path in [*PAGES, *(ROOT / "jaxres").rglob("*.py")] if path != page]
    texts = [before, after, *(path.read_text() for path in others)]
    words = re.sub(r"[\s_]+", " ", " ".join(texts)).lower()
    terms = [term for entry in entries for term in entry.split(", ")]
    assert [term for term in terms if term.lower() not in words] == []


@functools.cache
def _message_texts() -> list[str]:
    """Returns every string of the package; values that are filled in are `...`."""
    texts = []
    for path in (ROOT / "jaxres").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "..." for v in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


@pytest.mark.slow
def test_no_page_or_message_installs_a_package_that_is_not_registered():
    texts = [*(page.read_text() for page in PAGES), *_message_texts()]
    assert [text for text in texts if re.search(r"pip install[^`\n&]*[ '\"]jaxres\b", text)] == []


@pytest.mark.parametrize("page", ["troubleshooting.md", "gce-reference.md"])
def test_every_message_that_a_page_quotes_is_in_the_code(page):
    text = (ROOT / "docs" / page).read_text()
    messages = text.rpartition("\n## Messages\n")[2]  # Without that heading, the whole page.
    cells = re.findall(r"^\| (`[^|]+`)[^|]*\|", messages, re.MULTILINE)
    quoted = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert quoted
    assert [message for message in quoted if not _is_in_one_string(message)] == []


@pytest.mark.parametrize(
    ("page", "head", "choice"),
    [
        ("data.md", "| `data.source.kind` | reads |", Source),
        ("gce-reference.md", "| `kind` | provisioning model | notes |", CapacityOption),
    ],
    ids=["sources", "capacity options"],
)
def test_a_table_of_kinds_has_every_kind_of_the_schema(page, head, choice):
    rows = (ROOT / "docs" / page).read_text().split(f"\n{head}\n")[1].split("\n\n")[0]
    union = typing.get_args(choice)[0]  # Without the name of the field that tells them apart.
    kinds = [section.model_fields["kind"].default for section in typing.get_args(union)]
    assert sorted(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)) == sorted(kinds)


def _is_in_one_string(message: str) -> bool:
    pieces = [piece.strip() for piece in message.split("...") if len(piece.strip()) > 3]
    return any(all(piece in text for piece in pieces) for text in _message_texts())


def test_every_test_and_mutant_that_the_track_record_names_exists():
    text = (ROOT / "tests/promises/README.md").read_text()
    files = list((ROOT / "tests").rglob("*.py"))
    functions = " ".join(re.findall(r"def (test_\w+)", "".join(f.read_text() for f in files)))
    names = {path.stem for path in files} | set(functions.split())
    assert set(re.findall(r"\btest_\w+", text)) - names == set()
    mutants = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", text))
    assert mutants - {mutant.name for mutant in read_all()} == set()


def test_the_example_model_can_be_built(monkeypatch):
    (source,) = (block for kind, block in FENCE.findall((ROOT / "docs/models.md").read_text())
                 if kind == "python")  # fmt: skip
    module = types.ModuleType("my_model")
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, "my_model", module)
    section = CustomModel(kind="custom", target="my_model:build")
    model = custom.build(section, vocab_size=257, seq_len=8)
    assert model.logits is None
