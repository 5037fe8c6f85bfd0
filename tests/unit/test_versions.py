"""What `perdure restart` compares: raised with every format, claimed only where a test says so."""

from services.scheduler import journal_segment
from services.store.arena import records
from services.store.disk import footer, index
from shared import identity
from shared.config import FaultsConfig
from shared.messages.base import PROTOCOL
from shared.versions import STATE, Versions

FORMATS = {1: {"journal": 1, "arena": 1, "segments": 1, "index": b"2", "identities": 2}}
"""By STATE. A format that changes needs a new line here, and STATE raised to its number."""


def test_the_state_version_stands_for_every_format_of_what_outlives_a_process() -> None:
    assert FORMATS[STATE] == {
        "journal": journal_segment.FORMAT,
        "arena": records.VERSION,
        "segments": footer.FORMAT,
        "index": index.FORMAT,
        "identities": identity.KEY_FORMAT,
    }


def test_services_claim_the_truth_unless_a_fault_hook_says_otherwise() -> None:
    assert Versions.announced(FaultsConfig()) == (PROTOCOL, STATE)
    assert Versions.announced(FaultsConfig(announce_protocol=7, announce_state=8)) == (7, 8)
