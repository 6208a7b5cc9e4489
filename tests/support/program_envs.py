"""A black-box agent for the contract suite: a program that counts with the policy, and fails where the policy says."""

from __future__ import annotations

from black_box_programs import PLAIN
from external_envs import Integration, Script, Unavailable
from forge import Task
from forge.envs.episode import EpisodeProgram
from forge.envs.programs import program_episode
from forge.runtime.sandbox import find

_COUNT = (
    PLAIN
    + """
import socket, time
messages = json.load(open(os.environ["FORGE_TASK"]))["messages"]
for word in ("one", "two", "three"):
    answer = ask(messages)
    said = answer["content"].strip()
    if said == "crash":
        os.kill(os.getpid(), 9)
    if said == "hang":
        time.sleep(10_000)
    if said == "flood":
        sys.stdout.write("na " * 10_000_000)
        sys.stderr.write("na " * 1_000_000)
    if said == "violation":
        port = int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"\\0 this is not HTTP\\r\\n\\r\\n")
            connection.recv(100)
        ask("no messages")
    if said != word:
        sys.exit(1)
    messages += [answer, {"role": "user", "content": "Next."}]
"""
)


async def _open() -> EpisodeProgram:
    if not (find("namespaces").works or find("bubblewrap").works):
        raise Unavailable("this machine has no security boundary")
    return program_episode(["python3", "count.py"], files={"count.py": _COUNT}, timeout_s=300.0)


BLACK_BOX = Integration(
    "black-box",
    open=_open,
    task=Task("count:1", ({"role": "user", "content": "Count to three."},)),
    good=Script(("one", "two", "three"), reward=1.0),
    bad=Script(("one", "three"), reward=0.0),
    troubles={  # what the program does after the policy's answers is the policy's doing, and is graded
        "crash": Script(("one", "crash"), reward=0.0),
        "hang": Script(("one", "hang"), reward=0.0, args={"timeout_s": 5.0}),
        "flood": Script(("one", "flood"), reward=0.0),
        "violation": Script(("one", "violation"), reward=0.0),
    },
)
