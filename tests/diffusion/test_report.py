"""tools/report.py: which settings and results of runs stand in its table."""

import base64
import csv
import html
import io
import json
import math
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
import yaml
from matplotlib.axes import Axes
from PIL import Image

from diffusion.errors import ConfigError
from diffusion.runs import report as report_module
from diffusion.runs.page_script import SCRIPT
from diffusion.runs.report import _turned, _width, markdown, report
from diffusion.tracking import pictures
from diffusion.tracking.pictures import draw_loss_curve, draw_loss_curves, grid, save_grid
from diffusion.tracking.run_log import FIELDS


def a_run(folder, loss, *, extra="", **optim):
    """What a run of four rows leaves behind, each loss a tenth less than the one before."""
    folder.mkdir(parents=True)
    config = {"run_dir": str(folder), "train": {"steps": 40}, "optim": {"lr": 1e-4} | optim}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with open(folder / "metrics.csv", "w", newline="") as file:
        table = csv.DictWriter(file, FIELDS)
        table.writeheader()
        for i in range(4):
            values = dict.fromkeys(FIELDS, 1)
            values |= {"step": 10 * (i + 1), "loss": loss * 0.9**i, "images_per_s": 100 + i}
            table.writerow(values | {"seconds": 30 * (i + 1)})
        file.write(extra)
    return folder


@pytest.fixture
def sweep(tmp_path):
    for job, loss in enumerate((1.0, 0.5, 2.0)):
        a_run(tmp_path / "sweep" / str(job), loss, lr=1e-4 * (job + 1))
    (tmp_path / "sweep" / "1" / "evaluations.csv").write_text(
        "fid,kid,n,seed\n9,,10,0\n7.5,,20,0\n"
    )
    (tmp_path / "sweep" / "2" / "scores.csv").write_text("step,action_mse\n20,0.5\n40,0.25\n")
    return tmp_path / "sweep"


def test_the_folder_that_one_is_in_has_a_name(sweep, monkeypatch):
    monkeypatch.chdir(sweep / "1")
    assert report({"runs": "."})[0]["run"] == "1"


@pytest.mark.filterwarnings("error")
def test_letters_that_the_font_of_a_picture_lacks(tmp_path, monkeypatch):
    """They are escaped: a box stands for any letter, and Matplotlib warns of each."""
    titles, name = [], "象 ä $x$ \udcff"
    monkeypatch.setattr(Axes, "set_title", lambda axes, text, **_: titles.append(text))
    folder = tmp_path / name
    folder.mkdir()
    (folder / "metrics.csv").write_text("step,loss\n1,0.5\n")
    draw_loss_curve(folder / "metrics.csv", folder / "loss.png")
    assert titles == ["\\u8c61 ä $x$ \\udcff"]
    draw_loss_curves({name: ([1, 2], [1, 0.5])}, tmp_path / "a.png")


def test_the_table(sweep, capsys):
    rows = report({"runs": str(sweep)})
    assert list(rows[0]) == [
        *("run", "optim.lr", "step", "loss", "images_per_s", "minutes"),
        *("fid", "images of evaluations", "action_mse"),
    ]
    assert [row["run"] for row in rows] == ["0", "1", "2"]
    assert [row["optim.lr"] for row in rows] == ["0.0001", "0.0002", "0.00030000000000000003"]
    assert rows[0] | {"optim.lr": ""} == {
        **{"run": "0", "optim.lr": "", "step": "40", "loss": "0.729", "images_per_s": "101.5"},
        **{"minutes": "2", "fid": "-", "images of evaluations": "-", "action_mse": "-"},
    }
    assert (rows[1]["fid"], rows[1]["images of evaluations"]) == ("7.5", "20")
    assert rows[2]["action_mse"] == "0.25"
    said = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in said}) == 1 and set(said[1]) <= set("| -")
    assert len(said[0]) <= 100  # as wide as it is, with a column for each run
    heads = [line.split()[1] for line in (said[0], *said[2:])]
    assert heads == [
        "run",
        "optim.lr",
        "step",
        "loss",
        "images_per_s",
        "minutes",
        "fid",
        "images",
    ] + ["action_mse"]


def test_sorted_and_written(sweep, tmp_path):
    rows = report({"runs": [str(sweep)], "sort": "fid", "out": str(tmp_path / "out" / "a.csv")})
    assert [row["run"] for row in rows] == ["1", "0", "2"]
    rows = report({"runs": str(sweep), "sort": "loss", "out": str(tmp_path / "out" / "a.md")})
    assert [row["run"] for row in rows] == ["1", "0", "2"]
    with open(tmp_path / "out" / "a.csv") as file:
        assert [row["fid"] for row in csv.DictReader(file)] == ["7.5", "-", "-"]
    page = (tmp_path / "out" / "a.md").read_text()
    assert page.startswith("| run | optim.lr ") and page.endswith(
        "\n\n![Losses of the runs over their steps](<a.png>)\n"
    )
    assert Image.open(tmp_path / "out" / "a.png").width > 400


def test_a_loss_alone_is_seen(tmp_path):
    """As of a run that is shorter than train.log_every: a dot in the middle, not an empty frame."""
    (tmp_path / "metrics.csv").write_text("step,loss\n4,0.5\n")
    draw_loss_curve(tmp_path / "metrics.csv", tmp_path / "a.png")
    draw_loss_curves({"run": ([4], [0.5])}, tmp_path / "b.png")
    for name, colour in (("a.png", (158, 202, 225)), ("b.png", (31, 119, 180))):
        picture = np.asarray(Image.open(tmp_path / name).convert("RGB"))
        height, width, _ = picture.shape
        middle = picture[height // 4 : -height // 4, width // 4 : -width // 4]
        assert (middle == colour).all(axis=2).sum() > 5, name


def test_runs_without_a_loss_are_not_in_the_legend(tmp_path, monkeypatch, recwarn):
    """Those that failed at once, that have only begun, or that diverged from the first row on."""
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    empty = {"failed": ([], []), "diverged": ([1, 2], [math.nan, math.inf])}
    draw_loss_curves({"good": ([1, 2], [1, 0.5])} | empty, tmp_path / "a.png")
    draw_loss_curves(empty, tmp_path / "b.png")
    some, none = (figure.axes[0].get_legend() for figure in drawn)
    assert [text.get_text() for text in some.get_texts()] == ["good"]
    assert none is None and not recwarn.list


@pytest.mark.parametrize(("last", "scale"), [(0.5, "log"), (math.nan, "log"), (0.0, "linear")])
def test_losses_stand_on_a_logarithmic_axis(last, scale):
    """Also beside those of a run that diverged, and with plain numbers."""
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot()
    axes.plot([1, 0.6, last])
    pictures._show_powers(axes, [1, 0.6, last])
    figure.draw_without_rendering()
    labels = {text.get_text() for text in axes.get_yticklabels(which="both")}
    assert axes.get_yscale() == scale and "0.6" in labels


def test_steps_below_a_curve_are_whole_numbers():
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot()
    axes.plot([2, 4], [1, 0.9])
    pictures._name_axes(axes, "loss")
    figure.draw_without_rendering()
    assert [text.get_text() for text in axes.get_xticklabels()][1:-1] == ["2", "3", "4"]


def test_folders_are_in_the_order_of_their_numbers(tmp_path):
    names = ["lr=1e-05", "lr=0.0002", "lr=0.001", "lr=2", "lr=10", "lr=x"]
    for name in reversed(names):
        a_run(tmp_path / name, 1.0)
    assert [row["run"] for row in report({"runs": str(tmp_path)})] == names


def test_one_run_and_runs_in_several_folders(sweep, tmp_path):
    (row,) = report({"runs": str(sweep / "1")})
    assert row["run"] == "1" and "optim.lr" not in row
    a_run(tmp_path / "alone", 1.0, extra="50,half", beta=2)  # the machine failed in the last row
    rows = report({"runs": [str(tmp_path / "alone"), str(sweep)]})
    assert [row["run"] for row in rows] == ["alone", "sweep/0", "sweep/1", "sweep/2"]
    assert [row["optim.beta"] for row in rows] == ["2", "-", "-", "-"]
    assert rows[0]["step"] == "40"


def test_runs_that_are_links_stand_in_it_once(tmp_path):
    a_run(tmp_path / "disk" / "a", 1.0)
    a_run(tmp_path / "runs" / "b", 1.0)
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "disk" / "a")
    (tmp_path / "runs" / "again").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "aa_newest").symlink_to("b")
    assert [row["run"] for row in report({"runs": str(tmp_path / "runs")})] == ["a", "b"]


def test_a_folder_of_everything_is_refused_and_a_run_is_not_searched(tmp_path, monkeypatch):
    """As `runs=/`, which would be read for as long as there are folders."""
    monkeypatch.setattr(report_module, "_MOST_FOLDERS", 4)
    a_run(tmp_path / "runs" / "checkpoints" / "0", 1.0)  # a name that is no run's
    for i in range(20):
        (tmp_path / "runs" / "checkpoints" / "0" / "checkpoints" / f"step_{i}").mkdir(parents=True)
    assert len(report({"runs": str(tmp_path)})) == 1
    (tmp_path / "runs" / "more").mkdir()
    with pytest.raises(ConfigError, match="holds more than 4 folders; give the folder of the runs"):
        report({"runs": str(tmp_path)})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runs": "swep"}, "runs=swep is no folder; did you mean runs=sweep. expected a run's"),
        ({"runs": "sweep/0/x"}, "runs=sweep/0/x is no folder; expected a run's"),
        ({"runs": "sweep/3"}, "no folder; runs: sweep/0, sweep/1, sweep/2; expected a run's"),
        ({"runs": "empty"}, "holds no run"),
        ({"sort": "los"}, "sort=los is no column; choose from run, optim.lr"),
        ({"out": "a.txt"}, "expected a .html or a .md or a .csv"),
    ],
    ids=str,
)
def test_wrong_settings(sweep, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    checkpoint = sweep / "0" / "checkpoints" / "step_00000040"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.yaml").touch()
    with pytest.raises(ConfigError, match=words):
        report({"runs": str(sweep)} | options)


def test_jobs_of_a_sweep_that_failed_stand_in_it(sweep, tmp_path, monkeypatch, capsys):
    """Also those that failed before they were a run."""
    for name, job in (
        ("0", {"state": "done"}),
        ("1", {"state": "running", "settings": {}}),
        ("3", {"state": "failed", "error": "a | b; try c", "settings": {"optim": {"lr": -1}}}),
    ):
        (sweep / name).mkdir(exist_ok=True)
        (sweep / name / "job.json").write_text(json.dumps(job))
    drawn = {}
    monkeypatch.setattr(report_module, "draw_loss_curves", lambda curves, out: drawn.update(curves))
    rows = report({"runs": str(sweep), "out": str(tmp_path / "a.md")})
    assert list(drawn) == ["0", "1", "2"]
    assert {row["run"]: row["state"] for row in rows} == {
        **{"0": "done", "1": "not finished", "2": "-"},
        "3": "failed: a | b",
    }
    assert rows[3]["optim.lr"] == "-1" and rows[3]["loss"] == "-"
    assert "failed: a \\| b |" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "[" * 100_000])
def test_a_record_that_cannot_be_read_is_none(sweep, text):
    (sweep / "0" / "job.json").write_text(text)
    assert "state" not in report({"runs": str(sweep)})[0]


def test_runs_that_cannot_be_read_are_named_and_the_others_reported(sweep, capsys):
    (sweep / "0" / "config.yaml").write_text("[" * 100_000)
    with open(sweep / "1" / "metrics.csv", "a") as file:
        file.write(",".join(["x"] * len(FIELDS)))
    for run, wrong in (("0", "0/config.yaml cannot be read"), ("1", "1 cannot be read: could not")):
        with pytest.raises(ConfigError, match=wrong):
            report({"runs": str(sweep / run)})
    assert [row["run"] for row in report({"runs": str(sweep)})] == ["2"]
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 2 and all(note.endswith("; this run is left out") for note in notes)


def evaluated(run, **row):
    """As tools/evaluate.py leaves it."""
    with open(run / "evaluations.csv", "w", newline="") as file:
        table = csv.DictWriter(file, list(row))
        table.writeheader()
        table.writerow(row)


def test_figures_whose_settings_differ_are_not_put_in_an_order(sweep, capsys):
    for job, fid in enumerate((3.0, 2.0, 1.0)):
        row = {"fid": fid, "n": 100, "reference": f"/{job}/data", "reference_data": "abc"}
        evaluated(sweep / str(job), **row, sampler="ddim", steps=50 if job else 20, seed=job)
    with pytest.raises(ConfigError, match=r"^fid does not compare: steps is 20 in 0 and 50 in 1; "):
        report({"runs": str(sweep), "sort": "fid"})
    rows = report({"runs": str(sweep), "sort": "fid", "across": ["steps"]})
    assert [row["run"] for row in rows] == ["2", "1", "0"]
    with pytest.raises(ConfigError, match="across has step, on which no figure depends.*steps"):
        report({"runs": str(sweep), "sort": "fid", "across": ["step"]})
    capsys.readouterr()
    report({"runs": str(sweep)})
    assert "note: fid does not compare: steps is 20 in 0 and 50 in 1\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="n is 100 in 0 and 7 in 2.*across=.n,steps. if"):
        evaluated(sweep / "2", **row | {"n": 7, "sampler": "ddim", "steps": 50})
        report({"runs": str(sweep), "sort": "fid"})


def test_of_other_data_or_predictions(tmp_path):
    """Held-out losses compare between predictions, and not between data; losses of training are
    the other way round."""
    for name, prediction, data in (("a", "epsilon", "11"), ("b", "v_prediction", "11")):
        run = a_run(tmp_path / name, 1.0)
        config = {"diffusion": {"prediction": prediction}}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        loss = 0.5 if name == "a" else 0.25
        (run / "held_out.csv").write_text(
            f"step,held_out,images,levels,data\n40,{loss},9,10,{data}\n"
        )
    rows = report({"runs": str(tmp_path), "sort": "held_out"})
    assert [(row["run"], row["held_out"]) for row in rows] == [("b", "0.25"), ("a", "0.5")]
    with pytest.raises(ConfigError, match="diffusion.prediction is epsilon in a and v_prediction"):
        report({"runs": str(tmp_path), "sort": "loss"})
    for across in ("diffusion", "diffusion.prediction"):  # a group, or a setting
        assert report({"runs": str(tmp_path), "sort": "loss", "across": [across]})
    text = (tmp_path / "b" / "held_out.csv").read_text()
    (tmp_path / "b" / "held_out.csv").write_text(text.replace(",11\n", ",22\n"))
    with pytest.raises(ConfigError, match="held_out does not compare: data is 11 in a and 22 in b"):
        report({"runs": str(tmp_path), "sort": "held_out"})


def test_scores_of_training_are_of_some_data(tmp_path):
    for name in "ab":
        run = a_run(tmp_path / name, 1.0)
        settings = {"train": {"fid_images": 8}, "dataset": {"name": "folder", "path": f"/{name}"}}
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
        (run / "scores.csv").write_text("step,fid\n40,12.5\n")
    with pytest.raises(ConfigError, match="fid does not compare: dataset.path is /a in a and /b"):
        report({"runs": str(tmp_path), "sort": "fid"})
    report({"runs": str(tmp_path), "sort": "fid", "across": ["dataset.path"]})


# --- the page -------------------------------------------------------------------------------------


def data_of(text):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    return json.loads(found.replace("<\\/", "</"))


@pytest.fixture
def looked_at(tmp_path):
    """Two runs with everything that a page shows; the second with fewer rows, and another seed."""
    for number, name in enumerate(("a", "</script><b>")):
        run = a_run(tmp_path / "runs" / str(number), 1.0 + number)
        config = {"train": {"seed": number, "steps": 40}, "note": name}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        band = "held_out,sigma_0.05_0.15,sigma_0.15_0.4"
        lines = [f"step,{band},images,levels,data", "20,0.5,1,0.25,9,10,x", "40,0.4,nan,0.2,9,10,x"]
        (run / "held_out.csv").write_text("\n".join(lines) + "\n")
        (run / "scores.csv").write_text("step,fid\n40,12.5\n")
        (run / "samples").mkdir()
        for step in range(2, 41, 2 + number):
            picture = grid(np.full((4, 8, 8, 3), step, np.uint8))
            save_grid(picture, 2, run / "samples" / f"step_{step:08d}.png")
        (run / "environment.json").write_text('[{"from_step": 0, "gpu": "H100 <x>"}]')
    (run / "samples" / "step_00000099.png").write_bytes(b"half a picture")
    return tmp_path / "runs"


def test_the_page_has_what_differs_first_then_curves_and_samples(looked_at, tmp_path, capsys):
    out = tmp_path / "new" / "report.html"
    report({"runs": str(looked_at), "out": str(out)})
    text = out.read_text()
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings == [
        *("What differs, and what came of it", "Curves", "Held-out loss by noise, at the end"),
        *("Samples", "Settings and machines"),
    ]
    assert "Not the same noise or sampling in all runs: train.seed differs." in text
    one, two = data_of(text)
    assert one["curves"]["loss"]["x"] == [10, 20, 30, 40] and one["colour"] != two["colour"]
    assert one["curves"]["sigma_0.05_0.15"] == {"x": [20], "y": [1.0]}  # nan is no point
    assert one["curves"]["fid"]["y"] == [12.5] and "data" not in one["curves"]
    assert one["clock"]["seconds"] == [30, 60, 90, 120] and one["clock"]["step"] == [10, 20, 30, 40]
    steps = [frame["step"] for frame in one["frames"]]
    assert len(steps) == 8 and steps[0] == 2 and steps[-1] == 40
    kind, _, content = one["frames"][-1]["source"].partition(";base64,")
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
    assert kind in ("data:image/png", "data:image/jpeg") and abs(int(picture[9, 9, 0]) - 40) < 3
    assert two["frames"][-1]["step"] < 99


def test_the_page_needs_nothing_else_and_says_names_as_they_are(looked_at, tmp_path):
    report({"runs": str(looked_at), "out": str(tmp_path / "a.html")})
    text = (tmp_path / "a.html").read_text()
    assert "</script><b>" not in text and "&lt;/script&gt;&lt;b&gt;" in text
    assert "H100 &lt;x&gt;" in text
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)|@import|url\(|fetch\(|import\(""", text)
    assert set(re.findall(r"https?://[^'\"\s]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_a_long_run_is_thinned_and_a_short_one_shown(tmp_path):
    run = a_run(tmp_path / "run", 1.0)
    rows = [dict.fromkeys(FIELDS, 1) | {"step": i + 1, "loss": 1 + i % 2} for i in range(5000)]
    with open(run / "metrics.csv", "w", newline="") as file:
        table = csv.DictWriter(file, FIELDS)
        table.writeheader()
        table.writerows(rows)
    report({"runs": str(run), "out": str(tmp_path / "a.html")})
    (data,) = data_of((tmp_path / "a.html").read_text())
    curve = data["curves"]["loss"]
    assert 400 < len(curve["x"]) <= 600 and curve["x"][-1] == data["clock"]["step"][-1] == 5000
    assert 400 < len(data["clock"]["images"]) < 700
    assert all(1.3 < value < 1.7 for value in curve["y"])
    (run / "metrics.csv").write_text(",".join(FIELDS) + "\n")
    report({"runs": str(run), "out": str(tmp_path / "b.html")})
    assert data_of((tmp_path / "b.html").read_text())[0]["curves"] == {}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_is_javascript(tmp_path):
    (tmp_path / "a.js").write_text(SCRIPT)
    done = subprocess.run(
        ["node", "--check", tmp_path / "a.js"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
# what somebody does who looks at it, and what is to be seen then
LOOK = """
const found = {}, box = node => { const b = node.getBoundingClientRect();
  return [Math.round(b.width), Math.round(b.height)]; };
const svg = document.querySelector('#curves .chart > svg'), at = svg.getBoundingClientRect();
found.chart = box(svg);
svg.dispatchEvent(new PointerEvent('pointermove',
  { clientX: at.left + 0.99 * at.width, clientY: at.top + 100 }));
found.tip = document.querySelector('#curves .tip').innerText;
found.keys = [...document.querySelectorAll('svg.key')].map(box);
found.pictures = [...document.querySelectorAll('#samples img')].map(box);
document.querySelector('.legend button').click();
found.left = document.querySelectorAll('#samples img').length;
found.page = document.documentElement.scrollWidth;
document.title = JSON.stringify(found);
"""


@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
def test_the_page_in_a_browser(looked_at, tmp_path):
    """Sizes of what stands on it, what it says where one points, and what is left of a run that is
    hidden."""
    out = tmp_path / "a.html"
    report({"runs": str(looked_at), "out": str(out)})
    out.write_text(out.read_text().replace("</body>", f"<script>{LOOK}</script></body>"))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900")
    done = subprocess.run(
        [BROWSER, *options, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", out.as_uri()],
        capture_output=True, text=True, timeout=240, env=os.environ | {"HOME": str(tmp_path)},
    )  # fmt: skip
    found = json.loads(html.unescape(re.search("<title>(.*?)</title>", done.stdout)[1]))
    assert found["chart"][0] > 900 and found["chart"][1] > 250
    assert "step 40" in found["tip"] and "0: 0.4" in found["tip"]
    assert found["keys"] and all(width < 40 and height < 20 for width, height in found["keys"])
    assert len(found["pictures"]) == 2 and all(width > 100 for width, _ in found["pictures"])
    assert found["left"] == 1 and found["page"] <= 1200


def test_a_wide_table_is_printed_with_a_column_for_each_run():
    rows = [{"run": n} | {f"model.setting_{i}": f"{n}{i}" for i in range(20)} for n in ("a", "b")]
    assert _width(markdown(rows)) > 100
    head, rule, first, *rest = _turned(rows).splitlines()
    assert head.split() == ["|", "run", "|", "a", "|", "b", "|"] and set(rule) == set("|- ")
    assert first.split() == ["|", "model.setting_0", "|", "a0", "|", "b0", "|"]
    assert len(rest) == 19 and _width(head) <= 100
