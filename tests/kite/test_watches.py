"""What looks on beside the orders: told when it changes, and alone in its failure."""

import asyncio

from structlog.testing import capture_logs

from kite.testing.eventually import eventually
from kite.watches import beside, tell


async def test_what_is_sampled_is_told_at_first_and_when_it_has_changed():
    said: list[int] = []
    looked = 0

    def sample() -> int:
        nonlocal looked
        looked += 1
        return looked // 10

    async def say(found: int) -> None:
        said.append(found)

    telling = asyncio.create_task(tell(sample, say, every_s=0.001))
    await eventually(lambda: looked > 100)
    telling.cancel()
    assert said == list(range(looked // 10 + 1))


async def test_a_watch_that_fails_is_said_in_the_log_and_the_others_go_on_until_the_end():
    stopped: list[str] = []

    async def broken() -> None:
        raise ValueError("not expected")

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("endless")

    with capture_logs() as logs:
        async with beside({"broken": broken, "endless": endless}):
            await eventually(lambda: logs)
            assert stopped == []
    assert stopped == ["endless"]
    assert [(line["event"], line["watch"], line["log_level"]) for line in logs] == [("watch_failed", "broken", "error")]
