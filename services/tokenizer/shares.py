"""How much of the tokenizer's work one user may have in hand, so that a user's flood is the user's own."""

from collections import Counter

from services.tokenizer.validate import Refusal
from shared.identity import LOCAL


class Shares:
    """Counts requests and bytes per principal; whoever works on this machine is bound by the tokenizer's own limits."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def check(self, principal: str, size: int) -> None:
        """Refusal when one more request of `size` bytes would be too much."""
        own, own_bytes = self._requests[principal], self._bytes[principal]
        if principal == LOCAL or (own < self._most and own_bytes + size <= self._most_bytes):
            return
        reason = f"{own:,} requests ({own_bytes:,} bytes) of user {principal} are being read already"
        reason += f"; at most {self._most:,} ({self._most_bytes:,} bytes) may be, try later"
        raise Refusal("overloaded", reason, {"requests": own, "user_requests": self._most})

    def begin(self, principal: str, size: int) -> None:
        """A request is being read."""
        self._requests[principal] += 1
        self._bytes[principal] += size

    def end(self, principal: str, size: int) -> None:
        """It is answered."""
        self._requests[principal] -= 1
        self._bytes[principal] -= size
        if not self._requests[principal]:
            del self._requests[principal], self._bytes[principal]
