"""`jaxres.checkpoints`: saved steps are verified, and a damaged one is never restored silently."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxres
from jaxres.cli.checkpoints import command
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Fenced, StorageUnavailable, Unrestorable, UsageError
from jaxres.own_loop.trees import to_plain
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import files


def state(step):
    return {"w": jnp.arange(2**12, dtype=jnp.float32) + step, "seen": np.full(3, step)}


def saved(folder, *steps, **settings):
    with jaxres.checkpoints(folder, **settings) as saves:
        for step in steps:
            saves.save(step, state(step), position={"row": 10 * step})
    return jaxres.checkpoints(folder)


def damage(folder, step):
    """Flips a bit in the largest file of a step."""
    (step_dir,) = (folder / "checkpoints").glob(f"{step:08d}-*")
    path = max((p for p in step_dir.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_steps_are_restored_with_their_positions(tmp_path):
    reader = saved(tmp_path, 1, 2)
    assert reader.steps() == [1, 2]
    for number in (1, 2):
        step = reader.restore(state(0), step=number)
        assert (step.step, step.position) == (number, {"row": 10 * number})
        assert step.tree["w"][0] == number
        assert step.tree["seen"].tolist() == [number] * 3
    assert reader.restore(state(0)).step == 2
    assert [report.problems for report in reader.verify()] == [(), ()]


def test_the_digest_of_a_step_has_its_position(tmp_path):
    def digest(name, position):
        with jaxres.checkpoints(tmp_path / name) as saves:
            saves.save(1, state(1), position=position)
        return saves.verify(1)[0].digest

    digests = [digest(name, row) for name, row in (("a", 1), ("b", 2), ("c", 1), ("d", None))]
    assert digests[0] == digests[2]
    assert len(set(digests)) == 3


def test_the_arrays_may_be_donated_or_changed_right_after_the_call(tmp_path):
    train = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    array, numbers = jnp.arange(2**20, dtype=jnp.float32), np.arange(2**20)
    with jaxres.checkpoints(tmp_path) as saves:
        saves.save(1, {"w": array, "n": numbers})
        numbers[:] = -1
        jax.block_until_ready(train(array))
        saves.wait()
    like = {"w": jax.ShapeDtypeStruct((2**20,), jnp.float32), "n": numbers}
    tree = saves.restore(like).tree
    assert np.array_equal(tree["w"], np.arange(2**20))
    assert np.array_equal(tree["n"], np.arange(2**20))
    assert not np.shares_memory(to_plain({"n": numbers})["n"], numbers)


def test_nothing_saved_is_none_and_a_step_that_is_not_committed_an_error(tmp_path):
    assert jaxres.checkpoints(tmp_path / "none").restore(state(0)) is None
    with pytest.raises(UsageError, match=r"step 3 is not committed \(committed: 1\)"):
        saved(tmp_path, 1).restore(state(0), step=3)


@pytest.mark.parametrize("owns", [True, False])
def test_a_damaged_newest_step_falls_back_and_is_printed(tmp_path, capfd, owns):
    reader = saved(tmp_path, 1, 2)
    damage(tmp_path, 2)
    if owns:
        with jaxres.checkpoints(tmp_path) as saves:
            assert saves.restore(state(0)).step == 1
            saves.save(2, state(7))
        assert "step 2 is damaged and is excluded" in capfd.readouterr().err
        assert reader.restore(state(0)).tree["w"][0] == 7
    else:
        assert [bool(report.problems) for report in reader.verify()] == [False, True]
        assert reader.restore(state(0)).step == 1
        assert "ALARM: step 2 is damaged" in capfd.readouterr().err
        with pytest.raises(Unrestorable, match="step 2"):
            reader.restore(state(0), step=2)
        assert not run_log.fold(run_log.read_records(RunDir(tmp_path).log)).quarantined


def test_another_shape_or_dtype_is_refused_with_leaf_recorded_and_given(tmp_path):
    reader = saved(tmp_path, 1)
    other = state(0) | {"w": jnp.ones((2, 3), jnp.int32), "more": jnp.ones(1)}
    with pytest.raises(ConfigError) as error:
        reader.restore(other)
    assert re.search(r"w: float32\[4096\], expected int32\[2, ?3\]", str(error.value))
    assert re.search(r"more: absent, expected float32\[1\]", str(error.value))


def test_a_second_owner_gets_the_known_error_and_readers_do_not(tmp_path):
    with jaxres.checkpoints(tmp_path) as saves:
        saves.save(1, state(1))
        saves.wait()
        with pytest.raises(Fenced, match="owned by host"), jaxres.checkpoints(tmp_path):
            pass
        assert jaxres.checkpoints(tmp_path).restore(state(0)).step == 1


def test_a_step_that_does_not_follow_the_newest_is_refused(tmp_path):
    with jaxres.checkpoints(tmp_path) as saves:
        saves.save(5, state(5))
        for step in (5, 4, 0, -1, 1.5, "6"):
            with pytest.raises(UsageError, match=r"does not follow step 5|give a whole number"):
                saves.save(step, state(1))
        saves.save(np.int64(6), state(6))
    assert saves.steps() == [5, 6]


def test_saving_without_owning_is_refused(tmp_path):
    with pytest.raises(UsageError, match="own the folder first"):
        jaxres.checkpoints(tmp_path).save(1, state(1))
    assert not list(tmp_path.iterdir())


def test_a_failed_save_is_an_error_at_the_end(tmp_path, monkeypatch, capfd):
    def refuse(_):
        raise StorageUnavailable("no space left")

    def loop():
        with jaxres.checkpoints(tmp_path) as saves:
            saves.save(1, state(1))
            saves.wait()
            monkeypatch.setattr(files, "free_bytes", refuse)
            saves.save(2, state(2))

    with pytest.raises(StorageUnavailable, match=r"newest committed step is 1\. no space left"):
        loop()
    assert "ALARM: step 2 could not be saved" in capfd.readouterr().err
    assert jaxres.checkpoints(tmp_path).steps() == [1]


def test_an_error_of_the_loop_loses_no_save(tmp_path):
    def loop():
        with jaxres.checkpoints(tmp_path) as saves:
            saves.save(1, state(1))
            raise ValueError("wrong data")

    with pytest.raises(ValueError, match="wrong data"):
        loop()
    assert jaxres.checkpoints(tmp_path).steps() == [1]
    (end,) = [r.body for r in run_log.read_records(RunDir(tmp_path).log)][-1:]
    assert (end.exit, "wrong data" in end.reason) == (ExitCode.BUG, True)


def test_settings_are_those_of_a_config_and_others_are_refused(tmp_path):
    assert saved(tmp_path, 1, 2, 3, keep_last=2).steps() == [2, 3]
    for settings, message in (
        ({"keep_lost": 2}, "keep_lost: unknown key"),
        ({"keep": {"last": 1}}, "checkpoint.keep.last: must be at least 2"),
        ({"replica": {"path": "x"}}, "replica has no effect here"),
        ({"keep_last": jnp}, "no value of a config"),
    ):
        with pytest.raises(ConfigError, match=message):
            jaxres.checkpoints(tmp_path, **settings)


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        (["checkpoints", "list"], "committed"),
        (["checkpoints", "verify"], "step 1: valid"),
        (["status"], "nothing: its program has ended"),
        (["history", "--attempts"], "DONE"),
    ],
)
def test_commands_on_runs_read_such_a_folder(tmp_path, capsys, verb, text):
    saved(tmp_path, 1)
    assert command.main([*verb, str(tmp_path)], usage="") == ExitCode.DONE
    assert text in capsys.readouterr().out


def test_a_run_of_the_trainer_is_not_saved_to(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="a run of a config"), jaxres.checkpoints(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
