"""Environments for the tests of their processes: each row says what becomes of its episode."""

import asyncio
import ctypes
import os
import subprocess
import sys
import time


async def play(row, model, scale=1.0):
    await asyncio.sleep(0)
    what = row["what"]
    if what == "raise":
        raise ValueError("no such move")
    if what == "exit":
        sys.exit(3)
    if what == "child exits":
        await asyncio.gather(asyncio.create_task(leave()))
    if what == "hang":
        await asyncio.sleep(1000)
    if what == "swallow":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue
    if what == "block":
        while True:
            pass
    if what == "die":
        os._exit(7)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "eat":
        held = []
        while True:
            held.append(b"x" * (32 << 20))
            await asyncio.sleep(0.01)
    if what == "flood":
        while True:
            print("lots of words" * 1000)
    if what == "nonsense":
        return "good"
    if what == "leave behind":
        program = [sys.executable, "-c", "import time; time.sleep(1000)"]
        subprocess.Popen(program, start_new_session=True)
        await asyncio.sleep(1000)
    if what == "bystander" and "again" not in model.session:
        await asyncio.sleep(1000)
    answer = await model.chat([{"role": "user", "content": str(row["number"])}])
    print("a word of the environment")
    return {"reward": scale * float(answer["content"]), "metrics": {"length": len(answer)}}


async def leave():
    sys.exit(3)


def play_plainly(row, model):
    if row["what"] == "hang":
        time.sleep(1000)
    if row["what"] == "die":
        os._exit(7)
    answer = model.chat([{"role": "user", "content": str(row["number"])}])
    return {"reward": float(answer["content"]), "turn_rewards": [0.5]}


async def rows(count):
    return [{"prompt": f"row {n}", "what": "good", "number": n} for n in range(count)]
