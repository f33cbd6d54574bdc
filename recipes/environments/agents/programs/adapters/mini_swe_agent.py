"""Let mini-swe-agent 2 work on one task, as `agents/coding/programs.py` says. It runs in that program's environment."""

from __future__ import annotations

import json
import platform
import socket
import sys
from typing import Any

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # the first line of the output that ends its work
SYSTEM = "You are a software engineer who works in a shell. Each answer calls the tool bash at least once."
TASK = f"""The repository in {{{{cwd}}}} has a fault. Change its source so that what follows holds, but no test.

{{{{task}}}}

Every command runs in a new bash in {{{{cwd}}}}: directory and variables do not last. When the work is done, run
`echo {SUBMIT}` as a command of its own."""
# Its exit status -> the end of the work; any other is a failure of the program.
ENDS = {
    "Submitted": "finished",
    "LimitsExceeded": "max_iteration",
    "TimeExceeded": "timeout",
    "RepeatedFormatError": "other",
    "ContextWindowExceededError": "context_window",
    "NotFoundError": "max_iteration",  # the model server takes no more calls
}


class TaskContainer:
    """An environment of mini-swe-agent: the task's container, over a socket."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._stream = socket.socket(fileno=task["container"]).makefile("rw", encoding="utf-8", newline="\n")
        self._seconds = task["command_seconds"]
        self._cwd = task["workspace"]
        self.config = None

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        seconds = min(timeout or self._seconds, self._seconds)
        self._stream.write(json.dumps({"command": str(action.get("command", "")), "seconds": seconds}) + "\n")
        self._stream.flush()
        reply = json.loads(self._stream.readline() or '{"ended": "died"}')
        if "ended" in reply:
            sys.exit(3)
        status, text = reply["status"], reply["output"]
        lines = text.lstrip().splitlines()
        if status == 0 and lines and lines[0].strip() == SUBMIT:
            from minisweagent.exceptions import Submitted

            extra = {"exit_status": "Submitted", "submission": ""}
            raise Submitted({"role": "exit", "content": "", "extra": extra})
        wrong = f"The command did not end within {seconds:g} s." if status is None else ""
        return {"output": text, "returncode": -1 if status is None else status, "exception_info": wrong}

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        return {"cwd": self._cwd, **platform.uname()._asdict(), **kwargs}

    def serialize(self) -> dict[str, Any]:
        return {}


def main() -> None:
    """Read the task, work, and print the result. Only here is what this repository's own Python does not have."""
    import litellm
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_model import LitellmModel

    task = json.load(sys.stdin)
    server = task["model_server"]
    model = LitellmModel(
        model_name=f"openai/{server['model']}",
        model_kwargs={"api_base": server["base_url"], "api_key": "of-the-path", "drop_params": True},
    )
    agent = DefaultAgent(
        model,
        TaskContainer(task),
        system_template=SYSTEM,
        instance_template=TASK,
        step_limit=task["max_turns"],
        cost_limit=0,
    )
    try:
        status = str(agent.run(task["problem"]).get("exit_status", ""))
    except (litellm.exceptions.ContextWindowExceededError, litellm.exceptions.NotFoundError) as error:
        status = type(error).__name__
    sys.stdout.write(json.dumps({"end": ENDS.get(status, "other"), "error": status}) + "\n")


if __name__ == "__main__":
    main()
