from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one module: its event loop runs as long, and tests of others have their own."""
    with chromium() as chromium_browser:
        yield chromium_browser
