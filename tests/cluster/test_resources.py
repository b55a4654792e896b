"""Placements: how they are written, and what a machine without the devices answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verl.cluster import resources
from verl.cluster.local import LocalExecutor
from verl.cluster.resources import Placement, ResourcePool, parse_placement, resolve_placements
from verl.config.schema import Resource
from verl.errors import ConfigError, PlacementError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set how many GPUs torch reports."""

    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return have


@pytest.mark.parametrize(
    ("value", "kind", "indices"),
    [
        ({"gpu": [0, 3]}, "gpu", (0, 3)),
        ({"gpu": 2}, "gpu", (0, 1)),
        ({"cpu": 1}, "cpu", (0,)),
        ({"cpu": [0]}, "cpu", (0,)),
    ],
)
def test_spellings(value: dict[str, Any], kind: str, indices: tuple[int, ...]) -> None:
    assert parse_placement(value, "actor") == Placement(kind, indices)


@pytest.mark.parametrize(
    "value",
    [{}, {"tpu": 1}, {"gpu": 0}, {"gpu": -1}, {"gpu": True}, {"gpu": []}, {"gpu": [-1]},
     {"gpu": ["0"]}, {"gpu": [True]}, {"gpu": 1.0}, {"gpu": 1, "cpu": 1}],
)  # fmt: skip
def test_other_spellings_are_refused_with_an_example(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r'resource\.critic: .* write \{"gpu": \[0\]\}'):
        parse_placement(value, "critic")


def test_repeated_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"resource\.actor: .*names a device twice"):
        parse_placement({"gpu": [1, 1]}, "actor")


def test_f01_missing_gpus_say_needed_there_and_what_works(gpus: Any) -> None:
    gpus(0)
    with pytest.raises(PlacementError) as caught:
        resolve_placements(Resource(actor={"gpu": [0, 1]}, critic={"gpu": [2]}))
    message = str(caught.value)
    assert "needs 3 (indices [0, 1, 2])" in message
    assert "actor gpu[0,1], critic gpu[2]" in message
    assert "this machine has 0" in message
    assert 'resource.actor = {"cpu": 1}, resource.critic = {"cpu": 1}' in message
    assert caught.value.exit_code == 3
    # What the message recommends works.
    placements = resolve_placements(Resource(actor={"cpu": 1}, critic={"cpu": 1}))
    assert {str(p) for p in placements.values()} == {"cpu[0]"}


def test_f01_only_roles_that_lack_a_device_are_named(gpus: Any) -> None:
    gpus(1)
    with pytest.raises(PlacementError, match=r"for critic gpu\[1\]; this machine has 1"):
        resolve_placements(Resource(actor={"gpu": [0]}, critic={"gpu": [1]}))


@pytest.mark.parametrize("value", [{"gpu": [0, 1]}, {"gpu": 2}, {"cpu": 2}])
def test_several_devices_for_one_role_are_refused(value: dict[str, Any], gpus: Any) -> None:
    gpus(2)
    kind = next(iter(value))
    with pytest.raises(PlacementError, match=rf'one device .*resource\.actor = {{"{kind}": 1}}'):
        resolve_placements(Resource(actor=value))


@pytest.mark.parametrize(("count", "expected"), [(0, "cpu[0]"), (2, "gpu[0]")])
def test_default_is_the_first_gpu_or_the_cpu(count: int, expected: str, gpus: Any) -> None:
    gpus(count)
    placements = resolve_placements(Resource())
    assert list(placements) == ["actor", "critic", "ref_policy", "reward_model"]
    assert {str(p) for p in placements.values()} == {expected}


def test_pool_has_the_devices_it_was_given(gpus: Any) -> None:
    assert ResourcePool({"cpu": 1}).devices == [torch.device("cpu")]
    gpus(4)
    pool = ResourcePool({"gpu": [3, 1]}, "actor")
    assert pool.devices == [torch.device("cuda", 3), torch.device("cuda", 1)]
    assert repr(pool) == "ResourcePool(actor: gpu[3,1])"
    gpus(2)
    with pytest.raises(PlacementError, match="this machine has 2"):
        ResourcePool({"gpu": [3]})


def test_local_executor_makes_the_worker_on_the_roles_device() -> None:
    executor = LocalExecutor(Resource(actor={"cpu": 1}))
    group = executor.start("actor", lambda device: {"device": device})
    assert executor.device("actor") == torch.device("cpu")
    assert group.role == "actor"
    assert group.workers == [{"device": torch.device("cpu")}]


def test_gpu_count_is_zero_where_torch_cannot_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert resources.gpu_count() == 0
