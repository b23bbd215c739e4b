"""A verifiers task set: sums with one reply each."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if "broken" in trace.last_reply:
            raise ValueError("this reply cannot be judged")
        return float(str(self.data.answer) in trace.last_reply)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        for number in range(10):
            yield SumTask(
                SumData(prompt=f"What is {number} + 1?", answer=number + 1), self.config.task
            )
