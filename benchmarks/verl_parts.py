"""Parts that benchmarks/peer_verl.py plugs into verl. They are imported in verl's own processes.

compute_score           the reward of benchmarks/peer_trl.py
DrawnLengthsLoop        verl's loop for single-turn responses, with a length for each response
FrequentReplayBuffer    verl's replay buffer, without the wait of up to 2 s after the last response
"""

import json
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_INTERVAL_S = 0.1


def compute_score(data_source: str, solution_str: str, ground_truth: str, **other: Any) -> float:
    return float(len(solution_str) % 7)


class DrawnLengthsLoop(SingleTurnAgentLoop):
    """End each response at its length, which is in the row of its prompt, by step and sample."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        lengths = json.loads(row["extra_info"]["lengths"])
        length = lengths[int(row["global_steps"]) - 1][int(row["session_id"])]
        return await super().run(sampling_params | {"max_tokens": length}, **row)


class FrequentReplayBuffer(ReplayBuffer):
    """Ask every 0.1 s whether all responses have arrived. verl itself asks every 2 s."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs | {"poll_interval": POLL_INTERVAL_S})
