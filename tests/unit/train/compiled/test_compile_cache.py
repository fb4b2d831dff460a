"""Compiled steps are loaded on all hosts from one compilation, or compiled on all hosts."""

import contextlib
import functools
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxres.clock import SystemClock
from jaxres.cluster import program_transfer
from jaxres.cluster.host_group import HostRank, SingleHost
from jaxres.cluster.program_transfer import PUBLIC_SECRET, AttemptKey, ProgramServer
from jaxres.config.schema.run_config import CompileSection, RunConfig
from jaxres.engine import executable
from jaxres.engine.executable import Signature
from jaxres.runlog.events import (
    CompiledStepsLoaded,
    CompiledStepsReceived,
    Noted,
    StepsCompiled,
)
from jaxres.train.compiled import compile_cache
from jaxres.train.compiled.compile_cache import StepToCompile
from jaxres.train.compiled.program_offers import Offer
from jaxres.train.compiled.xla_options import XlaOptions
from jaxres.train.context import NO_KEY
from tests.compiling import nothing_kept
from tests.waiting import SURE_SECONDS


@functools.cache
def here():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


@functools.cache
def x():
    return jax.ShapeDtypeStruct((3,), jnp.float32, sharding=here())


def test_a_program_with_code_of_the_user_is_identified_by_its_text_alone():
    data = {"source": {"kind": "text", "path": "x"}}
    custom = {"kind": "custom", "target": "optax:lamb"}
    plain = RunConfig.model_validate({"data": data, "train": {"steps": 1}})
    other = RunConfig.model_validate({"data": data, "train": {"steps": 1}, "optimizer": custom})
    assert compile_cache.cache_key_inputs(plain) is not None
    assert compile_cache.cache_key_inputs(other) is None


def test_combinations_of_learning_rates_names_and_tags_share_their_compiled_steps():
    def made_of(optimizer, **run):
        data = {"source": {"kind": "text", "path": "x"}}
        fields = {"data": data, "train": {"steps": 1}, "run": run}
        return compile_cache.cache_key_inputs(
            RunConfig.model_validate({**fields, "optimizer": {"kind": "adamw", **optimizer}})
        )

    first = made_of({"learning_rate": 1e-3}, name="a", dir="a")
    assert first == made_of({"learning_rate": 3e-3}, name="b", tags=("t",), dir="b")
    assert first != made_of({"learning_rate": 1e-3, "b1": 0.8})
    groups = ({"match": "*norm*", "learning_rate": 1e-4},)
    assert made_of({"learning_rate": 1e-3, "groups": groups}) != made_of(
        {"learning_rate": 3e-3, "groups": groups}
    ), "rates of groups are compiled as factors on the rate of the run"


class FirstOfTwoHosts(SingleHost):
    """Host 0 of two; host 1 publishes the given offer."""

    member = HostRank(host=0, num_hosts=2)

    def __init__(self, other):
        self.other, self.own = other.encode(), {}

    def publish(self, topic, message):
        self.own[topic] = message

    def poll(self, topic):
        return {0: self.own[topic], 1: self.other}


class Job:
    """Hosts in one process, each in a thread, which meet at barriers."""

    def __init__(self, num_hosts):
        self.barrier = threading.Barrier(num_hosts, timeout=SURE_SECONDS)
        self.published = {}
        self.num_hosts = num_hosts


class HostOfJob(SingleHost):
    def __init__(self, job, host):
        self.job, self.member = job, HostRank(host=host, num_hosts=job.num_hosts)

    def broadcast(self, topic, decide, *, seconds):
        if self.member.leads:
            self.publish(topic, decide())
        self.barrier(topic, seconds=seconds)
        return self.poll(topic)[0]

    def barrier(self, topic, *, seconds):
        self.job.barrier.wait()

    def publish(self, topic, message):
        self.job.published[topic, self.member.host] = message

    def poll(self, topic):
        return {host: m for (name, host), m in self.job.published.items() if name == topic}


@pytest.fixture
def get(tmp_path):
    """Returns a function that gets a step `x + constant`, and the events of doing so."""

    def get(*, constant=1, peers=None, made_of=None, cache_dir=tmp_path, key=NO_KEY, **options):
        events = []
        claim = SimpleNamespace(coordinator="127.0.0.1:80")
        context = SimpleNamespace(
            emit=events.append,
            clock=SystemClock(),
            peers=peers or SingleHost(),
            claim=claim,
            programs_key=key,
        )
        step = jax.jit(lambda x: x + constant, out_shardings=here())
        compiled = compile_cache.get(
            {"training": StepToCompile(partial(step.trace, x()), Signature((x(),), here()))},
            context,
            devices=jax.devices()[:1],
            made_of=made_of,
            section=CompileSection(cache_dir=cache_dir),
            options=XlaOptions(options),
            seconds=SURE_SECONDS,
        )
        assert compiled["training"].call(jax.device_put(jnp.ones(3), here()))[0] == 1 + constant
        (kind,) = [type(e) for e in events if isinstance(e, CompiledStepsLoaded | StepsCompiled)]
        return compiled["training"], kind, events

    return get


@pytest.fixture
def stored(get, tmp_path):
    """A step that is stored, with the message by which a host publishes it."""
    step, kind, _ = get(made_of={"a": 1})
    assert kind == StepsCompiled
    loaded, kind, _ = get(made_of={"a": 1})
    assert (kind, loaded.text, loaded.compilation) == (
        *(CompiledStepsLoaded, step.text, step.compilation),
    )
    by_text = executable.file_of(tmp_path / "programs", "*").name
    keys = [path.stem for path in (tmp_path / "programs").glob(by_text)]
    assert len(keys) == 2, "under the key of the config, and under that of the text"
    return step, keys


def test_hosts_load_programs_of_one_compilation_or_none(get, stored):
    """Kernels chosen in another compilation may give other bits on one of the hosts."""
    step, keys = stored
    found = [
        get(made_of={"a": 1}, peers=FirstOfTwoHosts(Offer((key,), (step.compilation,))))[1]
        for key in keys
    ]
    assert set(found) == {CompiledStepsLoaded, StepsCompiled}, "one of the keys is that of the text"
    for key in keys:
        again, kind, _ = get(made_of={"a": 1}, peers=FirstOfTwoHosts(Offer((key,), ("another",))))
        is_new = kind == StepsCompiled and again.compilation != step.compilation
        assert is_new, "programs of two compilations are in use"


def test_a_program_of_the_same_text_is_loaded_and_one_of_another_is_compiled(get, stored):
    step, _ = stored
    same, kind, _ = get(made_of={"a": 2})
    assert (kind, same.compilation) == (StepsCompiled, step.compilation)
    other, kind, _ = get(constant=2)
    assert kind == StepsCompiled
    assert other.compilation != step.compilation
    assert other.text != step.text


def test_a_program_of_other_options_of_xla_is_compiled(get, stored):
    """The lowered text does not have the options."""
    step, _ = stored
    other, kind, _ = get(made_of={"a": 1}, xla_llvm_disable_expensive_passes=True)
    assert kind == StepsCompiled
    assert other.text == step.text
    assert other.compilation != step.compilation, "a program of other options is in use"
    _, kind, _ = get(made_of={"a": 1}, xla_llvm_disable_expensive_passes=True)
    assert kind == CompiledStepsLoaded


def test_without_a_private_folder_the_steps_are_compiled_and_the_run_continues(
    get, stored, tmp_path
):
    step, _ = stored
    (tmp_path / "programs").chmod(0o777)
    compiled, kind, events = get(made_of={"a": 1})
    assert (kind, compiled.text) == (StepsCompiled, step.text)
    assert compiled.compilation != step.compilation
    notes = [event.message for event in events if isinstance(event, Noted)]
    assert any("expected a folder of this account" in note for note in notes)
    none, kind, _ = get(cache_dir=None)
    assert (kind, none.text) == (StepsCompiled, step.text)


KEY = AttemptKey(bytes(32), "")


@pytest.fixture
def get_on(get, tmp_path, monkeypatch):
    """Returns a function that gets the step on several hosts at once, each with its own folder."""

    def get_on(*hosts):
        """Gets it; `hosts` are the arguments of each host."""
        job = Job(len(hosts))

        def on(host, arguments):
            given = {"made_of": {"a": 1}, "key": KEY, "cache_dir": tmp_path / f"host{host}"}
            try:
                return get(peers=HostOfJob(job, host), **(given | arguments))
            except BaseException:
                job.barrier.abort()  # The other hosts do not wait for this one.
                raise

        with monkeypatch.context() as patch, nothing_kept(), ThreadPoolExecutor(len(hosts)) as pool:
            # It changes a setting of the process, which is in the key, for the other threads too.
            patch.setattr(compile_cache, "_without_jax_cache", contextlib.nullcontext)
            return list(pool.map(on, range(len(hosts)), hosts))

    return get_on


def kinds(found):
    return [kind for _, kind, _ in found]


def reasons(found):
    return [event.reason for _, _, events in found for event in events if hasattr(event, "reason")]


def lose(tmp_path, *hosts):
    for host in hosts:
        shutil.rmtree(tmp_path / f"host{host}")


@pytest.mark.parametrize("lost", [(1,), (0,), (0, 2)])
def test_a_host_without_the_steps_gets_them_from_another(get_on, tmp_path, lost):
    first = get_on({}, {}, {})
    assert kinds(first) == [StepsCompiled] * 3
    lose(tmp_path, *lost)
    again = get_on({}, {}, {})
    assert kinds(again) == [CompiledStepsLoaded] * 3, "a host has compiled"
    assert {step.compilation for step, _, _ in again} == {first[0][0].compilation}
    senders = {
        host: event.host
        for host, (_, _, events) in enumerate(again)
        for event in events
        if isinstance(event, CompiledStepsReceived)
    }
    assert set(senders) == set(lost)
    assert not set(senders.values()) & set(lost)
    assert kinds(get_on({}, {}, {})) == [CompiledStepsLoaded] * 3
    assert not any(
        isinstance(e, CompiledStepsReceived) for *_, events in get_on({}, {}, {}) for e in events
    ), "what was received was not stored"


def test_of_two_compilations_one_is_taken_by_all_hosts(get, get_on, tmp_path):
    for host in (0, 1):
        get(made_of={"a": 1}, cache_dir=tmp_path / f"host{host}")
    found = get_on({}, {})
    assert kinds(found) == [CompiledStepsLoaded] * 2
    assert len({step.compilation for step, _, _ in found}) == 1


def test_hosts_whose_keys_differ_take_nothing_from_each_other(get_on, tmp_path):
    """The key stands for versions, devices and their processes, XLA's flags and settings."""
    get_on({}, {})
    lose(tmp_path, 1)
    found = get_on({}, {"xla_llvm_disable_expensive_passes": True})
    assert kinds(found) == [StepsCompiled] * 2, "a program of other options is in use"
    assert all("have different versions, devices, XLA flags" in text for text in reasons(found))


@pytest.mark.parametrize("host", [0, 1])
def test_without_a_private_secret_each_host_compiles_and_says_why(get_on, tmp_path, host):
    get_on({}, {})
    lose(tmp_path, 1)
    given = [{}, {}]
    given[host] = {"key": AttemptKey(refusal=PUBLIC_SECRET)}
    found = get_on(*given)
    assert kinds(found) == [StepsCompiled] * 2
    assert all("readers of the bucket or mount have the secret" in text for text in reasons(found))


def test_hosts_with_different_keys_of_the_attempt_compile_and_say_why(get_on, tmp_path):
    get_on({}, {})
    lose(tmp_path, 1)
    found = get_on({}, {"key": AttemptKey(b"of another attempt", "")})
    assert kinds(found) == [StepsCompiled] * 2
    assert all("could not send them: it closed the connection" in text for text in reasons(found))


def test_received_steps_that_cant_be_stored_are_used(get_on, tmp_path):
    get_on({}, {})
    lose(tmp_path, 1)
    (tmp_path / "host1").mkdir()
    (tmp_path / "host1" / "programs").mkdir(mode=0o777)
    (tmp_path / "host1" / "programs").chmod(0o777)
    found = get_on({}, {})
    assert kinds(found) == [CompiledStepsLoaded] * 2
    notes = [event.message for event in found[1][2] if isinstance(event, Noted)]
    assert any("is not stored" in note for note in notes)


def nothing(data):
    return None


def half(data):
    return data[: len(data) // 2]


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def of_another_attempt(data):
    """An answer of the same hosts, recorded before: the request has another challenge now."""
    recorded = program_transfer.head(["a"], "0" * 64, [b"x"], key=KEY.key)
    return recorded + b"x"


TAMPERED = {
    nothing: "closed the connection",
    half: "closed the connection",
    flipped: "do not match their digest",
    of_another_attempt: "does not have the key of this attempt, or has changed it",
}


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda tamper: tamper.__name__)
def test_after_another_answer_all_hosts_compile_and_say_why(get_on, tmp_path, monkeypatch, tamper):
    get_on({}, {})
    lose(tmp_path, 1)
    with tampering(monkeypatch, tamper):
        found = get_on({}, {})
    assert kinds(found) == [StepsCompiled] * 2, "a program that was changed on its way is in use"
    assert all(TAMPERED[tamper] in text for text in reasons(found))
    assert kinds(get_on({}, {})) == [CompiledStepsLoaded] * 2, "nothing wrong was stored"


@contextlib.contextmanager
def tampering(monkeypatch, tamper):
    """Places a man in the middle before each server, who changes or holds back its answer."""
    with contextlib.ExitStack() as stack:

        class Tampering(ProgramServer):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                threading.Thread(
                    target=pass_on, args=(listener, self.address, tamper), daemon=True
                ).start()
                self.address = f"127.0.0.1:{listener.getsockname()[1]}"

        with monkeypatch.context() as patch:
            patch.setattr(compile_cache, "ProgramServer", Tampering)
            yield


def pass_on(listener, target, tamper):
    host, _, port = target.rpartition(":")
    near, _ = listener.accept()
    with near, socket.create_connection((host, int(port))) as far:
        with near.makefile("rb") as lines:
            far.sendall(lines.readline())
        with far.makefile("rb") as answer:
            if (data := tamper(answer.read())) is not None:
                near.sendall(data)


def test_a_host_whose_file_is_damaged_takes_it_from_another(get_on, tmp_path):
    get_on({}, {})
    for path in (tmp_path / "host0" / "programs").glob("*.compiled"):
        path.write_bytes(flipped(path.read_bytes()))
    found = get_on({}, {})
    assert kinds(found) == [CompiledStepsLoaded] * 2
    assert any(isinstance(event, CompiledStepsReceived) for event in found[0][2])


def test_a_program_of_another_compilation_than_the_one_asked_for_is_refused(
    get, get_on, tmp_path, monkeypatch
):
    """A source whose file is replaced between its offer and its answer."""
    get_on({}, {})
    lose(tmp_path, 1)
    get(made_of={"a": 1}, cache_dir=tmp_path / "other")
    contents = [path.read_bytes() for path in (tmp_path / "other" / "programs").iterdir()]

    class Replaced(ProgramServer):
        def __init__(self, programs, **kwargs):
            super().__init__(dict.fromkeys(programs, contents[0]), **kwargs)

    monkeypatch.setattr(compile_cache, "ProgramServer", Replaced)
    found = get_on({}, {})
    assert kinds(found) == [StepsCompiled] * 2, "programs of two compilations are in use"
    assert all(" instead of " in text for text in reasons(found))


def test_a_source_that_cant_listen_is_named(get_on, tmp_path, monkeypatch):
    get_on({}, {})
    lose(tmp_path, 1)

    def refuse(*_, **__):
        raise OSError("no port is free")

    monkeypatch.setattr(compile_cache, "ProgramServer", refuse)
    found = get_on({}, {})
    assert kinds(found) == [StepsCompiled] * 2
    assert all("host 0 could not send them: it can't listen" in text for text in reasons(found))
