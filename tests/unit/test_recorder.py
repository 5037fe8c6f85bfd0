from pathlib import Path

from services.worker.recorder import Recorder, recorded
from shared.messages.base import pack_u32
from shared.messages.engine import Plan, Row, SampleSpec


def test_recorded_plans_come_back_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    plans = [
        Plan(epoch=1, seq=seq, rows=(Row(seq, 0, pack_u32([seq, 2]), pack_u32([9]), SampleSpec()),)) for seq in range(5)
    ]
    recorder = Recorder(path)
    for plan in plans:
        recorder.append(plan)
    assert list(recorded(path)) == plans
    path.write_bytes(path.read_bytes()[:-3])
    assert list(recorded(path)) == plans[:-1]
