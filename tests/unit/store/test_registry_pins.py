"""Pins in the registry: what stays readable, under which name, and when its memory is free again."""

from __future__ import annotations

import pytest
from test_registry import POLICY, Driver, request, whole

from forge.errors import StoreError, StoreKeyError
from forge.store.records import pinned_name, pinned_version
from forge.store.registry import Key
from forge.store.registry_pins import PinningRegistry

PINNED: Key = ("weights", "policy@1")
TRAINER, CONTROLLER, READER = 1, 2, 3


@pytest.fixture
def driver() -> Driver:
    return Driver(PinningRegistry)


def pin(driver: Driver, number: int = 1, *, session: int = CONTROLLER, is_copy: bool = False) -> int:
    registry = driver.registry
    assert isinstance(registry, PinningRegistry)
    return registry.pin(session, POLICY, number, is_copy).id


def pinned(driver: Driver) -> list[tuple[int, int]]:
    assert isinstance(driver.registry, PinningRegistry)
    return [(info.number, info.num_pins) for info in driver.registry.pinned(POLICY)]


def test_a_pinned_version_survives_keep_and_has_new_readers(driver: Driver) -> None:
    first, segment = driver.publish(TRAINER, request(version=1))
    lease = pin(driver)
    segments = [driver.publish(TRAINER, request(version=number))[1] for number in (2, 3, 4)]
    assert driver.numbers() == [3, 4]
    assert pinned(driver) == [(1, 1)]
    found = driver.acquire(READER, PINNED).version
    assert (found.number, found.digest, found.parts) == (1, first.digest, first.parts)
    assert segment not in segments  # nobody wrote there
    driver.registry.release(lease)


def test_its_memory_is_free_with_the_last_pin_and_the_last_reader(driver: Driver) -> None:
    _, segment = driver.publish(TRAINER, request(version=1))
    one, other = pin(driver), pin(driver)
    reader = driver.acquire(READER, PINNED)
    for number in (2, 3):
        driver.publish(TRAINER, request(version=number))
    driver.registry.release(one)
    assert pinned(driver) == [(1, 1)]
    driver.registry.release(other)
    assert pinned(driver) == []
    with pytest.raises(StoreKeyError):
        driver.acquire(READER, PINNED)
    assert driver.publish(TRAINER, request(version=4))[1] != segment
    driver.registry.release(reader.id)
    assert (READER, segment) in driver.told.drops or segment in str(driver.registry._spares)
    driver.registry.release(one)  # harmless
    driver.registry.retire(POLICY, keep=0)
    assert set(driver.tables()) == set()


def test_a_pin_ends_with_its_process(driver: Driver) -> None:
    driver.publish(TRAINER, request(version=1))
    pin(driver)
    for number in (2, 3):
        driver.publish(TRAINER, request(version=number))
    driver.registry.left(CONTROLLER)
    assert pinned(driver) == []
    driver.registry.retire(POLICY, keep=0)
    assert driver.tables() == {}


def test_weights_that_went_back_do_not_touch_it(driver: Driver) -> None:
    first, _ = driver.publish(TRAINER, request(version=1))
    lease = pin(driver)
    driver.registry.rewind(POLICY, to=0)
    again, _ = driver.publish(TRAINER, request(version=1, layout=whole("v")))
    assert driver.acquire(READER).version.digest == again.digest != first.digest
    assert driver.acquire(READER, PINNED).version.digest == first.digest
    with pytest.raises(StoreError, match="another version 1 of 'policy' is pinned") as caught:
        pin(driver)
    assert "release the pin" in str(caught.value)
    driver.registry.release(lease)


def test_a_version_under_its_pinned_name_is_pinned_as_it_is(driver: Driver) -> None:
    driver.publish(TRAINER, request(version=5))
    copy, _ = driver.publish(CONTROLLER, request(PINNED, version=1, keep=1))
    lease = pin(driver, is_copy=True)
    assert driver.registry.retire(PINNED, keep=0) == []
    assert driver.registry.rewind(PINNED, to=0) == []
    assert driver.registry.delete("weights", ["policy@1"]) == 0
    assert driver.acquire(READER, PINNED).version == copy
    driver.registry.left(READER)
    driver.registry.release(lease)
    assert driver.numbers(PINNED) == []
    driver.publish(CONTROLLER, request(PINNED, version=1, keep=1))  # the number is free again
    assert driver.numbers(PINNED) == [1]


def test_what_is_not_published_cannot_be_pinned(driver: Driver) -> None:
    driver.publish(TRAINER, request(version=3))
    with pytest.raises(StoreKeyError, match="no 'policy version 1'") as caught:
        pin(driver)
    assert "published versions: [3]" in str(caught.value)
    assert pinned(driver) == []


def test_a_pinned_version_whose_only_holder_ended_is_lost(driver: Driver) -> None:
    driver.publish(TRAINER, request(version=1))
    pin(driver)
    driver.registry.left(TRAINER)
    with pytest.raises(StoreError, match="is lost"):
        driver.acquire(READER, PINNED)


def test_names_of_pinned_versions() -> None:
    assert pinned_name("policy", 12) == "policy@12"
    names = ["policy@12", "policy@x", "policy", "other@12", "policy@12@3"]
    assert [pinned_version("policy", name) for name in names] == [12, None, None, None, None]
