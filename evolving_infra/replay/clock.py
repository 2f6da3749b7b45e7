"""The replay's clock. Tests hand in another one."""

import asyncio


class Clock:
    """Monotonic seconds, and a way to wait for them."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep_until(self, moment: float) -> None:
        """Return at ``moment``, at once if it has passed."""
        if moment > self.now():
            await asyncio.sleep(moment - self.now())
