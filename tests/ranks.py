"""Programs that run as the ranks of a gloo group, each in a process of its own."""

import multiprocessing
import socket
from importlib.util import find_spec

import torch
import torch.distributed as dist

from hybridrl.controller.worker import Rendezvous, WorkerContext
from hybridrl.parallel.process_group import join_group_world

# The process that ranks are forked from has these imported; it starts once for all tests.
MODULES = [
    "hybridrl.engine.hybrid_engine",
    *(["hybridrl.rollout.vllm_engine"] if find_spec("vllm") else []),
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
]


def run_ranks(program, folder, world, *arguments):
    """What `program(rank, *arguments)` gives in each of `world` processes of one group."""
    multiprocessing.set_forkserver_preload(MODULES)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        torch.multiprocessing.start_processes(
            _joined,
            args=(program, world, *listener.getsockname(), listener, folder, arguments),
            nprocs=world,
            start_method="forkserver",
        )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _joined(rank, program, world, address, port, listener, folder, arguments):
    rendezvous = Rendezvous(address, port, listener if rank == 0 else None)
    join_group_world(
        WorkerContext("actor", rank, world, host=rank, hosts=world, rendezvous=rendezvous)
    )
    torch.save(program(rank, *arguments), folder / f"{rank}.pt")
    if dist.is_initialized():  # vLLM may have ended it
        dist.barrier()  # who ends first breaks the connections of those that still work
        dist.destroy_process_group()
