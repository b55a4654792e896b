"""The batch type: columns of both kinds, selection, joining, moving."""

from __future__ import annotations

import pytest
import torch

from verl.batch import Batch
from verl.cluster.worker_group import WorkerGroup


def small() -> Batch:
    return Batch({"ids": torch.tensor([[1, 2], [3, 4], [5, 6]])}, {"text": ["a", "b", "c"]})


def test_reads_both_kinds_of_columns() -> None:
    batch = small()
    assert len(batch) == 3
    assert batch["ids"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert batch["text"] == ["a", "b", "c"]
    assert batch.names() == ["ids", "text"]
    assert "ids" in batch
    assert "text" in batch
    assert "other" not in batch
    assert len(Batch({}, {})) == 0


def test_unequal_lengths_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"differ in length: \{'x': 3, 'y': 2\}"):
        Batch({"x": torch.zeros(3)}, {"y": [1, 2]})


def test_missing_column_names_itself_and_what_there_is() -> None:
    with pytest.raises(
        KeyError, match=r"no column 'score' in this batch; it has \['ids', 'text'\]"
    ):
        small()["score"]
    with pytest.raises(KeyError, match=r"GAE needs columns \['values'\]; the batch has"):
        small().require(["ids", "values"], "GAE")
    small().require(["ids", "text"], "GAE")


def test_with_columns_leaves_the_old_batch_alone() -> None:
    old = small()
    new = old.with_columns(score=torch.tensor([1.0, 2.0, 3.0]), tag=("x", "y", "z"))
    assert new["score"].tolist() == [1.0, 2.0, 3.0]
    assert new["tag"] == ["x", "y", "z"]
    assert "score" not in old


def test_column_can_change_its_kind() -> None:
    as_list = small().with_columns(ids=["p", "q", "r"])
    assert as_list["ids"] == ["p", "q", "r"]
    as_tensor = as_list.with_columns(ids=torch.zeros(3), text=torch.ones(3))
    assert as_tensor["ids"].tolist() == [0, 0, 0]
    assert as_tensor["text"].tolist() == [1, 1, 1]
    assert as_tensor.names() == ["ids", "text"]


def test_select_takes_any_order_and_repeats() -> None:
    chosen = small().select([2, 0, 2])
    assert chosen["ids"].tolist() == [[5, 6], [1, 2], [5, 6]]
    assert chosen["text"] == ["c", "a", "c"]
    assert len(small().select([])) == 0


def test_concat_restores_what_select_took_apart() -> None:
    whole = small()
    joined = Batch.concat([whole.select([0]), whole.select([]), whole.select([1, 2])])
    assert torch.equal(joined["ids"], whole["ids"])
    assert joined["text"] == whole["text"]


def test_concat_fills_narrower_parts_with_zeros_on_the_right() -> None:
    wide = Batch({"m": torch.tensor([[True, True, True]]), "x": torch.tensor([[1.0, 2.0, 3.0]])})
    narrow = Batch({"m": torch.tensor([[True]]), "x": torch.tensor([[4.0]])})
    joined = Batch.concat([wide, narrow])
    assert joined["x"].tolist() == [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]
    assert joined["m"].tolist() == [[True, True, True], [True, False, False]]


def test_concat_refuses_nothing_and_different_columns() -> None:
    with pytest.raises(ValueError, match="list of no batches"):
        Batch.concat([])
    with pytest.raises(ValueError, match=r"columns \['ids', 'text'\] and \['text'\]"):
        Batch.concat([small(), Batch({}, {"text": ["d"]})])


def test_send_to_asks_the_group_where_it_works() -> None:
    class Worker:
        device = torch.device("meta")

    sent = small().send_to(WorkerGroup("actor", [Worker()]))
    assert sent["ids"].device.type == "meta"
    assert sent["text"] == ["a", "b", "c"]
