"""One browser for all tests of pages."""

import shutil
import tempfile

import pytest
from selenium import webdriver

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --window-size=1280,900"
)


@pytest.fixture(scope="session")
def browser():
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    assert all(programs), (
        "the tests look at pages in a browser: make browser installs chromium and chromedriver"
    )
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(prefix="shardwise-browser-") as profile:
        for flag in [*FLAGS.split(), f"--user-data-dir={profile}"]:
            options.add_argument(flag)
        driver = webdriver.Chrome(options, webdriver.ChromeService(programs[1]))
        yield driver
        driver.quit()
