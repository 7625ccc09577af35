"""What collectors cost and keep, on every registered one: counted in questions to the machine, not in time."""

from __future__ import annotations

from itertools import pairwise

from tests.fakes.collecting import COLLECTORS, collect, every_collector, everything, gpus, make
from tests.fakes.machine import FakeMachine, add_process, rich_machine
from tests.fakes.reachable import reachable_count

ONCE_PER_MACHINE = {
    "read /proc/self/mountinfo": 3,  # hidepid, cgroup hierarchies, the mounts themselves: three readers, three forms
    "read /proc/cpuinfo": 3,  # at first sight only: name and architecture, packages
    "read /proc/sys/kernel/arch": 2,
    "read /proc/stat": 2,  # the time of boot, once for good; then the CPUs
    "read /proc/sys/kernel/random/boot_id": 2,  # once for good: of the host, and to know ourselves among peers
    "statvfs /dev/shm": 2,  # as a mount, and as the place of shared memory
    "stat /dev/shm": 2,
}
ONCE_PER_PROCESS = {
    "status": 2,  # at first sight: the owner, then all its fields
    "task": 2,  # the threads, and once more those whose switches are counted
    "fd/N": 2,  # stat: which file it is, then its size
    "maps": 3,  # at first sight: who shares memory, who has CUDA, where RAS listens who has NCCL; too large to be kept
}


def questions(workers: int, names: list[str], rounds: int) -> list[dict[tuple[str, str], int]]:
    machine = FakeMachine(rich_machine(workers))
    collectors = [make(name) for name in names]
    answers = []
    for _ in range(rounds):
        world = machine.next_round()
        machine.fs.asked.clear()
        for collector in collectors:
            collect(collector, world, [*everything(world), *gpus()])
        answers.append(dict(machine.fs.asked))
    return answers


def test_t09_nothing_is_read_twice_in_a_round() -> None:
    """All collectors together, over one World: one reading per file and round, but for the few that are listed."""
    for number, asked in enumerate(questions(20, list(COLLECTORS), 5), 1):
        for (what, path), times in asked.items():
            if times == 1:
                continue
            parts = path.split("/")
            if parts[1] == "proc" and parts[2].isdecimal():
                rest = "/".join("N" if part.isdecimal() else part for part in parts[3:])
                assert times <= ONCE_PER_PROCESS.get(rest, 1), (number, what, path, times)
                assert number == 1 or rest == "task", (number, what, path, times)
            else:
                assert times <= ONCE_PER_MACHINE.get(f"{what} {path}", 1), (number, what, path, times)


@every_collector
def test_t08_cost_is_linear_in_processes(name: str) -> None:
    """Questions asked at first sight grow by the same number for each process; in later rounds by a few at most."""
    first, later = [], []
    for workers in (0, 30, 60, 90):
        rounds = [sum(asked.values()) for asked in questions(workers, [name], 13)]
        first.append(rounds[0])
        later.append(sum(rounds[1:]) / 12)
    steps = [after - before for before, after in pairwise(first)]
    assert steps[0] == steps[1] == steps[2], f"{first}: not linear"
    assert steps[0] <= 30 * 14
    steady = [(after - before) / 30 for before, after in pairwise(later)]
    assert max(steady) <= 5, f"{steady} questions per process and round"
    assert max(steady) - min(steady) <= 0.25, f"{steady}: not linear"


def test_what_is_gone_is_forgotten() -> None:
    """Defect 13: with processes that come and go for ever, nothing grows for ever, in collectors or in sources."""
    files = rich_machine().copy()
    machine = FakeMachine(files)
    collectors = [make(name) for name in COLLECTORS]
    sizes = []
    pid = 20_000
    for number in range(1, 260):
        for old in range(pid - 6, pid):
            files.remove(f"/proc/{old}")
        for _ in range(6):
            add_process(files, pid, f"job-{pid}", cgroup=f"/system.slice/job-{pid}.service", threads=2,
                        netns=5_000_000_000 + pid, fds={3: "/dev/nvidia0", 4: f"pipe:[{pid}]", 5: "w:pipe:[7001]"},
                        shared="7f00-7f02 rw-s 00000000 00:19 501 /dev/shm/ring\n")  # fmt: skip
            pid += 1
        world = machine.next_round()
        for collector in collectors:
            collect(collector, world, [*everything(world), *gpus()])
        if number in (131, 259):  # both three rounds after sources tidied up
            sizes.append(reachable_count((*collectors, world), leave_out=(type(machine.fs), type(machine.tape))))
    assert sizes[1] <= sizes[0] * 1.02 + 50, sizes
