"""The gallery of outputs can be made anew, and its page has the commands of today."""

from pages.gallery import PAGE, SCENES, gallery


def test_every_command_of_the_gallery_runs_and_is_on_the_page(tmp_path):
    made, page = gallery(tmp_path), PAGE.read_text(encoding="utf-8")
    for scene in SCENES:
        assert f"## hocket {scene.line}" in made
        assert f"## hocket {scene.line}" in page, "run python tests/pages/gallery.py"
    assert "Traceback" not in made
