import itertools

from jaxres.checkpoint.retention import step_name, sweep, to_prune


def test_the_newest_steps_are_kept_and_the_others_named():
    steps = [40, 10, 30, 20]
    assert to_prune(steps, keep_last=1) == (10, 20, 30)
    assert to_prune(steps, keep_last=3) == (10,)
    assert to_prune(steps, keep_last=4) == ()
    assert to_prune(steps, keep_last=9) == ()
    assert to_prune([], keep_last=1) == ()


def test_the_newest_step_is_never_pruned():
    for count, keep_last in itertools.product(range(1, 6), range(1, 6)):
        steps = range(10, 10 * count + 1, 10)
        assert steps[-1] not in to_prune(steps, keep_last=keep_last)


def test_names_tell_step_and_attempt_and_sort_by_step():
    assert step_name(12, attempt=3) == "00000012-0003"
    assert step_name(123456789, attempt=12345) == "123456789-12345"


def present(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_not_on_the_line_is_swept(tmp_path):
    for name in (
        "00000008-0001",
        "00000016-0001",
        "00000024-0002.orbax-checkpoint-tmp",
        "00000024-0002",
        ".00000004-0001.aabb.trash",
    ):
        (tmp_path / name / "state").mkdir(parents=True)
    swept = sweep(tmp_path, keep={"00000016-0001"}, attempt=2)
    assert present(tmp_path) == ["00000016-0001"]
    assert swept == ["00000008-0001", "00000024-0002", "00000024-0002.orbax-checkpoint-tmp"]


def test_an_owner_that_was_fenced_meanwhile_sweeps_nothing_of_its_successors(tmp_path):
    for name in ("00000024-0003", "00000032-0003.orbax-checkpoint-tmp", "00000024-0002"):
        (tmp_path / name).mkdir()
    sweep(tmp_path, keep=(), attempt=2)
    assert present(tmp_path) == ["00000024-0003", "00000032-0003.orbax-checkpoint-tmp"]


def test_what_is_somebody_elses_stays(tmp_path):
    for name in ("best", "00000008-0001-copy", "8-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "README").write_text("mine")
    before = present(tmp_path)
    assert sweep(tmp_path, keep=(), attempt=2) == []
    assert present(tmp_path) == before
