"""Asking the engines of this machine from the command line."""

from __future__ import annotations

from gateway.hosts.process.host import ProcessHost
from gateway.inquiry.answer_cache import AnswerCache
from gateway.inquiry.inquirer import Inquirer
from gateway.settings import load_settings


def inquirer() -> Inquirer:
    """Asks engines that `fitserve engine install` installed."""
    data = load_settings().data
    return Inquirer(ProcessHost(data), AnswerCache(data / "answers"))
