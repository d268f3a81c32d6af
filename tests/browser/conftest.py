"""One browser for all tests of pages."""

import shutil
import tempfile

import pytest
from selenium import webdriver

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


@pytest.fixture(scope="session")
def browser():
    """Yield a Chromium that logs all its requests and complaints."""
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    assert all(programs), (
        "chromium and chromedriver are missing: `make browser` installs them"
    )
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    with tempfile.TemporaryDirectory(prefix="shardwise-browser-") as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, webdriver.ChromeService(programs[1]))
        yield driver
        driver.quit()
