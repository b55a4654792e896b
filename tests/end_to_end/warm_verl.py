"""Runs `verl` command lines in forked children of one process that has the slow imports done.

In: JSON lines on stdin, {"start": [arguments], "output": file} or {"wait": pid}. Out: one line
each, the child's pid or its exit code (minus the signal that killed it).
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - the slow imports

import verl.cli.evaluate
import verl.cli.main
import verl.cli.prepare
import verl.cli.train
import verl.evaluation.policy
import verl.trainer.base
import verl.trainer.plan
import verl.trainer.ppo_task
import verl.trainer.reward_model
import verl.trainer.sft


def child(arguments: list[str], output: str) -> None:
    """Become `verl ARGUMENTS` with both streams in `output`."""
    os.close(0)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 1
    try:
        verl.cli.main.main(arguments)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        if sys.exc_info()[1] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Serve requests until stdin ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            child(request["start"], request["output"])
        print(pid, flush=True)


if __name__ == "__main__":
    main()
