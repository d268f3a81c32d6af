"""Imports go in one direction, and asking for help does not wait for JAX."""

import ast
import subprocess
import sys
from pathlib import Path

import shardwise

ROOT = Path(shardwise.__file__).parent
LEVELS = [
    {
        "errors",
        "metrics",
        "hardware",
        "flops",
        "hlo",
        "native",
        "precision",
        "shown",
        "page",
        "report_server",
        "doctor_probe",
        "doctor_finding",
        "models",
        "models.attention",
        "models.kernels",
        "data.shuffle",
    },
    {"tree", "report", "files", "signals", "resume", "roofline", "target", "jobfiles", "stopping", "origin", "data.files"}
    | {"metrics_file", "completion", "doctor_environment", "doctor_packages"}
    | {"models.norm", "models.table", "models.hopper", "models.cache", "models.sampling"},
    {"trackers", "models.activation", "models.loss"}
    | {
        "group",
        "launch",
        "doctor_system",
        "programs",
        "saved",
        "run_files",
        "sharding",
        "data.sources",
        "data.records",
        "data.tokenizers",
        "optim.schedules",
    },
    {
        "mesh",
        "pace",
        "doctor_run",
        "watch",
        "accounting",
        "curves",
        "published",
        "data.batches",
        "data.packing",
        "data.prepare",
        "models.gpt",
        "models.llama",
        "optim.groups",
    },
    {"doctor", "run_summary", "axes"}
    | {"module", "models.hf_config", "data.prefetch", "data.combine", "optim.parts", "optim.read", "optim.probe", "plan_picture"},
    {"data", "state", "finetune", "models.hf", "optim.recipes", "plan_page"}
    | {"report_summary", "report_curves", "report_time", "report_plan", "report_about"},
    {"step", "checkpoint", "export", "findings", "optim", "report_page"},
    {"loop", "profiling", "explanation", "initial", "report_command"},
    {"run"},
    {"planning", "comparison", "telling"},
    {"saving", "bad_steps", "search", "recipe", "checkpoint_commands", "diagnosis"},
    {"bookkeeping"},
    {"fitting", "data.show", "verification", "plan_command", "sample_command", "sweep_grid"},
    {"data.commands", "verify_command", "sweep"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shardwise"):
            yield node.module.removeprefix("shardwise").lstrip(".")


def test_a_module_imports_only_from_lower_levels():
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in ROOT.rglob("*.py")}
    modules.pop("__init__")
    assert set(modules) == set(LEVEL), "a new module needs a level"
    wrong = [(name, other) for name, path in modules.items() for other in imports_of(path) if LEVEL[other] >= LEVEL[name]]
    assert wrong == []


def test_models_import_nothing_of_ours_but_models():
    for name in [name for name in LEVEL if name.startswith("models.")]:
        path = ROOT / (name.replace(".", "/") + ".py")
        allowed = {"sharding"} if name == "models.llama" else set()  # `constrain`, which does nothing outside of a step
        assert all(other.startswith("models") for other in {*imports_of(path)} - allowed), name


def test_the_public_names_exist_and_help_does_not_import_jax():
    for name in shardwise.__all__:
        assert getattr(shardwise, name) is not None
    code = "import sys; from shardwise.cli import main; main(['--help']); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
