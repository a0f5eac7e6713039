"""The page to try a model on: its door, and the page itself in a browser where there is one."""

import importlib.util
import shutil
import socket
import subprocess
import sys
import time
import types
from typing import Any

import pytest
from ml_collections import ConfigDict

from errors import ConfigError
from modes import trained
from modes.demo import answers
from scripts import demo
from tests.test_main import ROOT, environment


def test_a_missing_nicegui_is_one_line_before_a_model_is_read(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name != "nicegui" and find_spec(name) or None
    )
    monkeypatch.setattr(trained, "load", lambda *_: 1 / 0)
    with pytest.raises(SystemExit) as refused:
        demo.main(["--workdir=nowhere"])
    assert str(refused.value) == "demo: the page needs NiceGUI: pip install 'nicegui>=3.18,<4'"


def test_a_port_in_use_is_one_line_before_a_model_is_read(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(trained, "load", lambda *_: 1 / 0)
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(SystemExit, match=f"^demo: --host=127.0.0.1 --port={port}: .*in use.*;"):
            demo.main(["--workdir=nowhere", f"--port={port}"])


@pytest.mark.slow
def test_the_page_in_a_browser(tiny_ratings, tmp_path):
    """Needs NiceGUI, selenium and Chromium; elsewhere it is skipped."""
    pytest.importorskip("nicegui")
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("needs chromium and chromedriver")
    train = ["main.py", "--config=configs/ncf.py", f"--workdir={tmp_path}/run"]
    keys = {"data_dir": tiny_ratings, "min_ratings": 2, "eval_negatives": 10, "train_steps": "2"}
    keys |= {"gmf_dim": 3, "mlp_layers": "(4,6,2)", "train_batch_size": 8, "eval_batch_size": 8}
    keys |= {"num_users": 0, "num_items": 0, "num_ratings": 0}
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    subprocess.run([sys.executable, *train, *flags], cwd=ROOT, env=environment(), check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "scripts.demo", f"--workdir={tmp_path}/run"]
    command += [f"--port={port}", "--no_browser"]
    outside = environment()
    outside.pop("PYTEST_CURRENT_TEST", None)  # with it, NiceGUI waits for its own test tools
    page = subprocess.Popen(command, cwd=ROOT, env=outside, stdout=subprocess.PIPE, text=True)
    try:
        assert page.stdout is not None and f"127.0.0.1:{port}" in page.stdout.readline()
        options = webdriver.ChromeOptions()
        for flag in ("headless", "no-sandbox", "disable-gpu", "disable-background-networking"):
            options.add_argument(f"--{flag}")
        options.binary_location = chromium
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            browser.implicitly_wait(60)
            for _ in range(120):  # until the page is served
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.5)
            browser.get(f"http://127.0.0.1:{port}")
            browser.find_element("css selector", "button").click()  # the field holds the user 1
            item = browser.find_element("css selector", "table tbody td").text
            assert int(item) in range(5, 120, 10)  # the ids of tiny_ratings
            browser.find_element("css selector", "input").send_keys("0")
            browser.find_element("css selector", "button").click()
            error = browser.find_element("css selector", ".text-negative").text
            assert error == "the model does not have this user"
            script = "return performance.getEntriesByType('resource').map(each => each.name)"
            loaded = browser.execute_script(script)
            assert loaded and all(url.startswith(f"http://127.0.0.1:{port}/") for url in loaded)
        finally:
            browser.quit()
    finally:
        page.kill()
        page.communicate()  # closes the pipe


def test_a_model_without_answers_is_refused():
    uses = types.SimpleNamespace(answers="", hint="evaluate it")
    model: Any = types.SimpleNamespace(
        source="run",
        benchmark=types.SimpleNamespace(uses=uses),
        config=ConfigDict({"benchmark": "x"}),
    )
    with pytest.raises(ConfigError, match="run is a model of the benchmark 'x'.*; evaluate it"):
        answers.make(model)
