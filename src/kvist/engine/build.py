"""From a configuration to an engine that can be started.

Responsible for the order in which the parts are made and for wiring them together; the only place that knows all of
them. Starts no thread.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from typing import TYPE_CHECKING

import torch

from kvist import plan as planning
from kvist.cache.hash import BlockHasher
from kvist.cache.manager import CacheManager
from kvist.cache.namespaces import Namespace
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.core import EngineCore
from kvist.model.catalog import resolve as resolve_model
from kvist.model.loader import load_decoder
from kvist.model.tokenizer import load_tokenizer
from kvist.runner.runner import ModelRunner
from kvist.sched.policy import Fcfs
from kvist.sched.scheduler import Scheduler
from kvist.storage.arena import BlockArena

if TYPE_CHECKING:
    from pathlib import Path

    from kvist.config import EngineConfig
    from kvist.plan import EnginePlan
    from kvist.spec import ModelSpec

logger = logging.getLogger(__name__)
