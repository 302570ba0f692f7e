"""Joining the hosts of a job into torch.distributed's default process group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from hybridrl.controller.worker import Context
from hybridrl.core.device import COLLECTIVES, make_current

COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""Longer than any call's deadline, which reports who hangs and where; this only ends orphans."""


def join(context: Context) -> torch.device:
    """Makes this host a member of the job's process group, once, and returns its device.

    All hosts meet at the first one. In a job of this machine alone every socket is bound to
    loopback. The environment variables that launchers set, and vLLM reads, are set as well.
    """
    device = make_current(context.device_kind, context.host)
    if dist.is_initialized():
        return device
    meeting = context.rendezvous
    os.environ.update(RANK=str(context.host), WORLD_SIZE=str(context.hosts), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if meeting is None:
        store: dist.Store = dist.HashStore()
    else:
        os.environ.update(MASTER_ADDR=meeting.address, MASTER_PORT=str(meeting.port))
        if meeting.address == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        store = dist.TCPStore(
            meeting.address,
            meeting.port,
            context.hosts,
            is_master=meeting.listener is not None,
            wait_for_workers=False,
            master_listen_fd=meeting.listener.detach() if meeting.listener else None,
        )
    dist.init_process_group(
        COLLECTIVES[context.device_kind],
        store=store,
        rank=context.host,
        world_size=context.hosts,
        timeout=COLLECTIVE_TIMEOUT,
    )
    return device
