"""CheckpointStore: saving, choosing, verifying, pruning, best."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.checkpoint.store import CheckpointStore
from verl.errors import CheckpointError


def text_files(**files: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        for name, text in files.items():
            path = directory / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    return write


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def saved(root: Path, *steps: int, keep: int = 2) -> CheckpointStore:
    store = CheckpointStore(root, keep)
    for step in steps:
        store.save(step, text_files(state=f"state {step}", actor__model=f"weights {step}"), {})
    return store


def test_save_writes_the_files_and_a_manifest_that_describes_them(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=1)
    path = store.save(120, text_files(actor__model="abc", state="x"), {"metric": 1.5, "lr": (1, 2)})
    assert path == tmp_path / "run" / "checkpoints" / "step_000120"
    assert (path / "actor" / "model").read_text() == "abc"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format_version"] == 1
    assert manifest["step"] == 120
    assert manifest["files"] == [
        {"path": "actor/model", "size": 3, "sha256": hashlib.sha256(b"abc").hexdigest()},
        {"path": "state", "size": 1, "sha256": hashlib.sha256(b"x").hexdigest()},
    ]
    assert store.info(120) == {"metric": 1.5, "lr": [1, 2]}
    assert names(store.root) == ["step_000120"]
    assert store.verify(120) == []


def test_info_with_integer_keys_still_verifies(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, text_files(state="x"), {"seen": {2: "b", 10: "a"}})
    assert CheckpointStore(tmp_path, keep=1).latest() == 1
    assert store.info(1) == {"seen": {"2": "b", "10": "a"}}


def test_an_empty_store_has_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "absent", keep=1)
    assert (store.steps(), store.latest(), store.best()) == ([], None, None)
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 3.*steps: none"):
        store.path(3)


def test_path_of_a_missing_step_says_which_steps_exist(tmp_path: Path) -> None:
    store = saved(tmp_path, 10, 20)
    assert store.steps() == [10, 20]
    assert store.path(20) == tmp_path / "step_000020"
    with pytest.raises(CheckpointError, match="step 30; complete steps: 10, 20"):
        store.path(30)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_an_exception_while_writing_leaves_only_the_earlier_checkpoints(
    tmp_path: Path, error: BaseException
) -> None:
    store = saved(tmp_path, 1)

    def write(directory: Path) -> None:
        (directory / "half").write_text("…")
        raise error

    for step in (1, 2):
        with pytest.raises(type(error)):
            store.save(step, write, {})
    assert names(tmp_path) == ["step_000001"]
    assert store.verify(1) == []


def test_a_full_disk_is_a_checkpoint_error_that_names_the_place(tmp_path: Path) -> None:
    store = saved(tmp_path, 1)

    def write(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="step 2 could not be saved as .*step_000002.*space"):
        store.save(2, write, {})
    assert names(tmp_path) == ["step_000001"]


def link_out(directory: Path) -> None:
    (directory / "model").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("write", "info", "message"),
    [
        (text_files(), {}, "empty checkpoint"),
        (text_files(**{"manifest.json": "{}"}), {}, "reserved"),
        (link_out, {}, "link"),
        (text_files(a="b"), {"loss": float("nan")}, "not plain JSON"),
        (text_files(a="b"), {"path": Path("x")}, "not plain JSON"),
    ],
)
def test_content_that_cannot_be_a_checkpoint_is_refused(
    tmp_path: Path, write: Callable[[Path], None], info: dict[str, object], message: str
) -> None:
    store = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=message):
        store.save(2, write, info)
    assert names(tmp_path) == ["step_000001"]


def test_negative_step_and_keep_zero_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at least 1"):
        CheckpointStore(tmp_path, keep=0)
    with pytest.raises(CheckpointError, match="step -1"):
        saved(tmp_path, -1)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = saved(tmp_path, 5)
    store.save(5, text_files(state="newer", extra="e"), {"n": 2})
    assert (store.path(5) / "state").read_text() == "newer"
    assert not (store.path(5) / "actor").exists()
    assert names(tmp_path) == ["step_000005"]
    assert CheckpointStore(tmp_path, 1).verify(5) == []


def test_saving_the_same_content_again_does_not_touch_the_directory(tmp_path: Path) -> None:
    store = saved(tmp_path, 5)
    before = (tmp_path / "step_000005").stat().st_ino
    saved(tmp_path, 5)
    assert (tmp_path / "step_000005").stat().st_ino == before
    # With the same manifest but damaged content it is not the same checkpoint.
    (tmp_path / "step_000005" / "state").write_text("STATE 5")
    saved(tmp_path, 5)
    assert (tmp_path / "step_000005" / "state").read_text() == "state 5"
    assert names(tmp_path) == ["step_000005"]
    assert store.verify(5) == []


def truncate(directory: Path) -> None:
    os.truncate(directory / "state", 3)


def same_size(directory: Path) -> None:
    (directory / "state").write_bytes(b"\0" * (directory / "state").stat().st_size)


def tear_manifest(directory: Path) -> None:
    os.truncate(directory / "manifest.json", 40)


def edit_manifest(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"info": {}', '"info": {"best": true}'))


def newer_format(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))


@pytest.mark.parametrize(
    ("damage", "problem", "seen_without_hashing"),
    [
        (lambda d: (d / "manifest.json").unlink(), "manifest.json cannot be read", True),
        (tear_manifest, "manifest.json is not valid JSON", True),
        (edit_manifest, "manifest.json was altered", True),
        (newer_format, "version 2.*reads version 1", True),
        (lambda d: (d / "actor" / "model").unlink(), "actor/model is missing", True),
        (truncate, "state has 3 bytes, the manifest says 7", True),
        (same_size, "state does not have the content that was saved", False),
    ],
)
def test_latest_skips_a_damaged_directory_and_names_it(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    problem: str,
    seen_without_hashing: bool,
) -> None:
    store = saved(tmp_path, 2, 3)
    assert store.latest() == 3
    damage(tmp_path / "step_000003")
    for reader in (store, CheckpointStore(tmp_path, keep=1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert reader.latest() == 2
        assert len(caplog.records) == 1
        caplog_text = caplog.records[0].getMessage()
        assert "step_000003" in caplog_text
        assert reader.verify(3) and problem.split(".*")[0] in reader.verify(3)[0]
        assert reader.steps() == ([2] if seen_without_hashing else [2, 3])
    if seen_without_hashing:
        with pytest.raises(CheckpointError, match=f"{problem}.*complete steps: 2"):
            store.path(3)


def test_latest_is_silent_when_the_newest_is_sound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = saved(tmp_path, 2, 3)
    truncate(tmp_path / "step_000002")
    with caplog.at_level(logging.WARNING):
        assert store.latest() == 3
    assert caplog.records == []


def test_latest_warns_of_a_save_that_did_not_finish(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = saved(tmp_path, 2)
    (tmp_path / "step_000003.tmp-4194999-0123abcd").mkdir()
    with caplog.at_level(logging.WARNING):
        assert store.latest() == 2
    assert "step_000003.tmp-4194999-0123abcd" in caplog.records[0].getMessage()


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    (tmp_path / "step_000003").rename(tmp_path / "step_000009")
    assert store.steps() == []
    assert "holds step 3" in store.verify(9)[0]
    for name in ("step_9", "step_0000009", "step_000009.bak", "step_000009.tmp-1-01234567"):
        (tmp_path / "step_000009").rename(tmp_path / name)
        assert store.latest() is None
        (tmp_path / name).rename(tmp_path / "step_000009")
    (tmp_path / "step_000004").write_text("a file")
    assert store.steps() == []


def test_million_steps_sort_by_number(tmp_path: Path) -> None:
    store = saved(tmp_path, 999_999, 1_000_000)
    assert store.steps() == [999_999, 1_000_000]
    assert store.latest() == 1_000_000


def test_prune_counts_what_earlier_processes_left(tmp_path: Path) -> None:
    saved(tmp_path, 1, keep=1)
    store = saved(tmp_path, 2, keep=1)
    assert store.steps() == [1, 2], "nothing goes before prune is called"
    assert store.prune() == [1]
    assert names(tmp_path) == ["step_000002"]
    assert store.prune() == []


def test_prune_keeps_the_newest_the_protected_and_the_best(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, 4, 5, 6)
    store.mark_best(2, 0.75)
    assert CheckpointStore(tmp_path, 2).prune(protect={3, 77}) == [1, 4]
    assert store.steps() == [2, 3, 5, 6]
    assert store.best() == (2, 0.75)


def test_prune_never_deletes_the_only_sound_checkpoint(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, keep=1)
    same_size(tmp_path / "step_000003")
    assert store.prune() == [1]
    assert store.steps() == [2, 3]
    assert store.latest() == 2


def test_prune_leaves_damaged_directories_and_counts_only_complete_ones(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, keep=1)
    truncate(tmp_path / "step_000003")
    assert store.prune() == [1]
    assert names(tmp_path) == ["step_000002", "step_000003"]


def test_prune_removes_remains_of_dead_processes_only(tmp_path: Path) -> None:
    store = saved(tmp_path, 1)
    dead, parent = "step_000002.tmp-4194999-0123abcd", f"step_000002.tmp-{os.getppid()}-0123abcd"
    # After a restart in a container the dead process often had the id of this one.
    own = f"step_000002.tmp-{os.getpid()}-0123abcd"
    deleted = "step_000000.deleted-4194999-0123abcd"
    for name in (dead, parent, own, deleted):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("…")
    (tmp_path / ".best.json.tmp-4194999-0123abcd").write_text("{")
    store.prune()
    assert names(tmp_path) == ["step_000001", parent]


def test_prune_during_a_save_does_not_touch_it(tmp_path: Path) -> None:
    store = saved(tmp_path, 1)

    def write(directory: Path) -> None:
        (directory / "state").write_text("…")
        store.prune()

    store.save(2, write, {})
    assert store.latest() == 2


def test_an_interrupted_replacement_is_read_and_repaired(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    old = tmp_path / "step_000007.old-4194999-0123abcd"
    (tmp_path / "step_000007").rename(old)
    store = CheckpointStore(tmp_path, keep=1)
    assert store.latest() == 7
    assert store.path(7) == old
    store.prune()
    assert store.path(7) == tmp_path / "step_000007"
    assert store.verify(7) == []


def test_the_new_state_wins_over_one_that_was_being_replaced(tmp_path: Path) -> None:
    store = saved(tmp_path, 7)
    old = tmp_path / "step_000007.old-4194999-0123abcd"
    (tmp_path / "step_000007").rename(old)
    store.save(7, text_files(state="newer"), {})
    old_again = tmp_path / "step_000007.old-4194999-89abcdef"
    assert names(tmp_path) == ["step_000007", old.name]
    old.rename(old_again)
    assert (store.path(7) / "state").read_text() == "newer"
    store.prune()
    assert names(tmp_path) == ["step_000007"]
    assert (store.path(7) / "state").read_text() == "newer"


def test_best_is_replaced_and_survives_a_new_store(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2)
    store.mark_best(1, 0.1)
    store.mark_best(2, -0.30000000000000004)
    assert CheckpointStore(tmp_path, 1).best() == (2, -0.30000000000000004)


def test_best_must_exist_and_be_finite(tmp_path: Path) -> None:
    store = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match="step 2; complete steps: 1"):
        store.mark_best(2, 0.1)
    with pytest.raises(CheckpointError, match="metric is nan"):
        store.mark_best(1, float("nan"))
    assert store.best() is None


def test_a_damaged_best_record_stops_prune(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, keep=1)
    (tmp_path / "best.json").write_text('{"step": ')
    with pytest.raises(CheckpointError, match="best.json is damaged"):
        store.prune()
    assert store.steps() == [1, 2, 3]


def test_discard_after_forgets_the_abandoned_steps(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, 4)
    truncate(tmp_path / "step_000004")
    store.mark_best(3, 0.9)
    assert store.discard_after(2) == [3, 4]
    assert names(tmp_path) == ["step_000001", "step_000002"]
    assert store.best() is None
    store.mark_best(1, 0.5)
    assert store.discard_after(2) == []
    assert store.best() == (1, 0.5)


def test_discard_after_an_unsound_step_deletes_nothing(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3)
    same_size(tmp_path / "step_000002")
    with pytest.raises(CheckpointError, match="cannot go back to step 2.*sha256"):
        store.discard_after(2)
    assert store.steps() == [1, 2, 3]


def test_steps_reads_no_content_and_latest_hashes_once(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2)
    for directory in (tmp_path / "step_000001", tmp_path / "step_000002"):
        same_size(directory)
    assert store.steps() == [1, 2]

    big = CheckpointStore(tmp_path / "big", keep=1)
    big.save(1, lambda d: (d / "model").write_bytes(os.urandom(1 << 20)), {})
    access_before = read_bytes_of_this_process()
    assert big.latest() == 1
    assert read_bytes_of_this_process() - access_before < 1 << 20
    access_before = read_bytes_of_this_process()
    assert big.verify(1) == []
    assert read_bytes_of_this_process() - access_before >= 1 << 20
    access_before = read_bytes_of_this_process()
    assert CheckpointStore(tmp_path / "big", keep=1).latest() == 1
    assert read_bytes_of_this_process() - access_before >= 1 << 20


def read_bytes_of_this_process() -> int:
    counters = Path("/proc/self/io")
    if not counters.exists():
        pytest.skip("this system does not count what a process reads")
    return int(counters.read_text().split("rchar: ")[1].split()[0])
