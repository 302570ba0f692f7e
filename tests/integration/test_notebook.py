"""The notebook of examples/, its cells one after the other, as a kernel would run them."""

import io
import json
import sys
from pathlib import Path

import pytest
from settings import SHORT

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("process_group")]

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def test_the_cells_of_the_notebook_run_and_show_plain_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ipykernel", io)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    written = json.loads(NOTEBOOK.read_text())
    cells = ["".join(one["source"]) for one in written["cells"] if one["cell_type"] == "code"]
    assert not any(one.get("outputs") for one in written["cells"])
    first, *others = [compile(cell, NOTEBOOK.name, "exec") for cell in cells]
    kernel = {"__name__": "__main__"}
    exec(first, kernel)
    kernel["SETTINGS"] += [*SHORT, "devices=cpu"]
    for cell in others:
        exec(cell, kernel)
    shown = capsys.readouterr().out
    assert len(kernel["rewards"]) == 2 and "\x1b" not in shown
    for line in ("HybridRL grpo", "step 1/2 |", "supervised warm-up ...", "step 2: reward"):
        assert line in shown
    assert (tmp_path / "runs" / "latest" / "model").is_dir()
