"""The first script of the start page trains as it is printed."""

import re
import subprocess
import sys

from pages.pages import ROOT


def test_the_first_script_of_the_start_page_trains(tmp_path):
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(re.search(r"```python\n(.*?)```", text, re.S)[1])
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss ") == 3
    assert (tmp_path / "checkpoints").is_dir()
