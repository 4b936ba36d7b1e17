"""`hydra/launcher=skypilot` and `kubernetes`: what is written, by the published schemas, and what its script does."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.launch.kubernetes import IMAGE_USER
from qlora_fsdp.launch.node_script import notes_on_files_left_here
from qlora_fsdp.launch.sweep import Job
from qlora_fsdp.records.run_state import read_run
from tests.cli.launch import SCRIPT, child_environment, run_forked

ROOT = Path(__file__).parents[2]
SCHEMAS = Path(os.environ.get("CLUSTER_SCHEMAS", Path(sys.prefix) / "cluster_schemas"))
NOT_HERE = "the published schemas are not here: `make setup` gets them as packages"
RUN = ["model=tiny", "data=random", "training.max_steps=3", "training.max_length=64", "launch.dry_run=true"]
KUBERNETES = ["hydra/launcher=kubernetes", "kubernetes.image=me/image:1", "kubernetes.claim=work"]
SKYPILOT = [
    "hydra/launcher=skypilot",
    "skypilot.accelerators=H100:8",
    'skypilot.file_mounts={/shared: "s3://bucket"}',
]
SHARED = "run.folder=/shared/one"


def printed_documents(folder: Path, *typed: str) -> list[dict[str, Any]]:
    """The documents of a dry run. What is said to a person is on stderr."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "train", *RUN, *typed],
        cwd=folder,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return list(yaml.safe_load_all(done.stdout))


def check_kubernetes(document: dict[str, Any]) -> None:
    """By Kubernetes' own schema, in which no unknown field may stand."""
    if not SCHEMAS.is_dir():
        pytest.skip(NOT_HERE)
    folders = (SCHEMAS / "kubernetes_validate" / "kubernetes-json-schema").glob("*-local-strict")
    newest = max(folders, key=lambda folder: [int(part) for part in re.findall(r"\d+", folder.name)])
    group, _, version = document["apiVersion"].rpartition("/")
    name = "-".join(filter(None, (document["kind"].lower(), group, version)))
    schema = json.loads((newest / f"{name}.json").read_text())

    def read(uri: str) -> Resource[Any]:
        """Their other files, whatever address these are said to have."""
        return Resource.from_contents(json.loads((newest / uri.rpartition("/")[2]).read_text()), DRAFT7)

    jsonschema.Draft7Validator(schema, registry=Registry(retrieve=read)).validate(document)


def skypilot_schema(name: str) -> dict[str, Any]:
    """A schema of SkyPilot's, without its package, which asks for many others."""
    file = SCHEMAS / "sky" / "utils" / "schemas.py"
    if not file.is_file():
        pytest.skip(NOT_HERE)
    tree = ast.parse(file.read_text())
    kept = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {"__name__": "schemas"}
    found: dict[str, Any] = names | _stand_ins()
    exec(compile(ast.Module(kept, []), str(file), "exec"), found)
    imported = re.findall(r"^ +from (sky[\w.]*) import", file.read_text(), re.MULTILINE)  # within functions
    with pytest.MonkeyPatch.context() as patch:
        for module in {"sky", *imported}:
            patch.setitem(sys.modules, module, found["constants"])
        return dict(found[name]())


def _stand_ins() -> dict[str, Any]:
    """What the schemas ask of SkyPilot's other modules: lists of words, for fields that are not written here."""
    import enum
    from typing import Optional  # the module's own
    from unittest.mock import MagicMock

    class Words(MagicMock):
        def __iter__(self) -> Any:
            return iter(())

        def __add__(self, other: Any) -> Any:
            return other

    return {
        "Any": Any,
        "Dict": dict,
        "List": list,
        "Optional": Optional,
        "Tuple": tuple,
        "enum": enum,
        "os": Words(environ={}),
        "autostop_lib": Words(),
        "constants": Words(ALL_CLOUDS=("aws", "gcp", "azure", "kubernetes")),
        "kubernetes_enums": Words(),
    }


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_of_kubernetes_is_valid(nodes: int, tmp_path: Path) -> None:
    more = ["kubernetes.gpus_per_node=8", "kubernetes.cpus=32", "kubernetes.memory=256Gi", "kubernetes.queue=gpus"]
    more += ["kubernetes.namespace=team", "kubernetes.secrets={HF_TOKEN: hub}", f"kubernetes.nodes={nodes}"]
    documents = printed_documents(tmp_path, *KUBERNETES, *more, SHARED, "run.name=My Run_1")
    assert [document["kind"] for document in documents] == (["Job"] if nodes == 1 else ["Service", "Job"])
    for document in documents:
        check_kubernetes(document)
        assert document["metadata"]["name"] == "qlora-my-run-1"
        assert document["metadata"]["namespace"] == "team"
    job = documents[-1]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completions"] == spec["parallelism"] == nodes and spec["completionMode"] == "Indexed"
    assert pod["terminationGracePeriodSeconds"] == 120 and pod["restartPolicy"] == "Never"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "memory": "256Gi"}
    assert {"name": "shared", "mountPath": "/shared"} in container["volumeMounts"]
    secrets = {each["name"]: each["valueFrom"]["secretKeyRef"]["name"] for each in container["env"]}
    assert secrets == {"HF_TOKEN": "hub"} | ({} if nodes == 1 else {"QLORA_FSDP_RUN_KEY": "qlora-my-run-1-key"})


def test_a_train_job_of_kubeflow_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = printed_documents(
        tmp_path, *KUBERNETES, SHARED, "kubernetes.kind=train_job", "kubernetes.nodes=2", "kubernetes.gpus_per_node=4"
    )
    assert (job["kind"], job["apiVersion"]) == ("TrainJob", "trainer.kubeflow.org/v1alpha1")
    assert job["spec"]["trainer"]["numNodes"] == 2 and job["spec"]["trainer"]["numProcPerNode"] == 4
    assert "machine_rank: $PET_NODE_RANK" in job["spec"]["trainer"]["command"][-1]
    if not SCHEMAS.is_dir():
        pytest.skip(NOT_HERE)
    monkeypatch.syspath_prepend(str(SCHEMAS))
    models = pytest.importorskip("kubeflow_trainer_api.models")
    read = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert read.to_dict() == job  # a field that is not known would be gone


def test_a_task_of_skypilot_is_valid(tmp_path: Path) -> None:
    more = ["skypilot.num_nodes=2", "skypilot.infra=aws/us-east-1", "skypilot.use_spot=true", "skypilot.cpus=32+"]
    more += ["skypilot.image=me/image:1", "skypilot.secrets=[HF_TOKEN]", "skypilot.setup=[pip list]"]
    (task,) = printed_documents(tmp_path, *SKYPILOT, *more, SHARED)
    assert task["secrets"] == {"HF_TOKEN": None, "QLORA_FSDP_RUN_KEY": None}
    assert task["file_mounts"] == {"/shared": {"source": "s3://bucket", "mode": "MOUNT"}}
    assert task["setup"] == "pip list\n"
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [138, 143]}
    jsonschema.Draft202012Validator(skypilot_schema("get_task_schema")).validate(task)
    jsonschema.Draft202012Validator(skypilot_schema("get_resources_schema")).validate(task["resources"])
    for bucket in task["file_mounts"].values():
        jsonschema.Draft202012Validator(skypilot_schema("get_storage_schema")).validate(bucket)


def test_a_sweep_is_a_job_for_each_run_and_writes_nothing_here(tmp_path: Path) -> None:
    documents = printed_documents(tmp_path, "-m", *KUBERNETES, SHARED, "lora.r=8,16", "run.name=a")
    assert [each["metadata"]["name"] for each in documents] == ["qlora-a-0", "qlora-a-1"]
    scripts = [each["spec"]["template"]["spec"]["containers"][0]["command"][-1] for each in documents]
    assert ["lora.r=8" in scripts[0], "run.folder=/shared/one/lora.r=16" in scripts[1]] == [True, True]
    assert not list(tmp_path.iterdir())


def test_paths_on_the_volume_need_not_be_here(tmp_path: Path) -> None:
    typed = [text for text in RUN if text != "data=random"]
    code, printed = run_forked(tmp_path, "train", *typed, *KUBERNETES, SHARED, "data=/shared/chats.jsonl")
    assert code == 0 and re.search(r"data(\.path)?=/shared/chats\.jsonl", printed), printed
    code, printed = run_forked(tmp_path, "train", *typed, *KUBERNETES, SHARED, "data=/other/chats.jsonl")
    assert code == 2 and "data.path=/other/chats.jsonl does not exist" in printed, printed


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([*KUBERNETES[:2], SHARED], "is on no volume that outlives a node"),
        ([KUBERNETES[0], KUBERNETES[2], SHARED], "kubernetes.image is missing"),
        ([*KUBERNETES, "run.folder=/elsewhere/one"], "run.folder=/elsewhere/one is on no volume"),
        ([*KUBERNETES, SHARED, "launch.num_processes=2"], "launch.num_processes=2 has no effect with hydra/launcher="),
        ([*SKYPILOT[::2], SHARED], "skypilot.accelerators is missing"),
        ([*SKYPILOT[:2], SHARED], "is on no volume that outlives a node"),
        (["kubernetes.nodes=2"], "kubernetes.nodes=2 has no effect here: nothing is launched"),
    ],
)
def test_mistakes_are_told_here(typed: list[str], message: str, tmp_path: Path) -> None:
    code, printed = run_forked(tmp_path, "train", *RUN, *typed)
    assert code == 2 and message in printed, printed


def test_spot_machines_without_checkpoints_are_told(tmp_path: Path) -> None:
    code, printed = run_forked(tmp_path, "train", *RUN, *SKYPILOT, SHARED, "skypilot.use_spot=true")
    assert code == 0 and "Set checkpoint.every_minutes=15." in printed, printed
    code, printed = run_forked(
        tmp_path, "train", *RUN, *SKYPILOT, SHARED, "skypilot.use_spot=true", "checkpoint.every_minutes=5"
    )
    assert code == 0 and "Note" not in printed, printed


@pytest.mark.parametrize(
    "text",
    [
        "kubernetes: {setup: [curl x]}",
        "kubernetes: {image: theirs}",
        "kubernetes: {secrets: {HF_TOKEN: hub}}",
        "kubernetes: {claim: work}",
        "skypilot: {setup: [curl x]}",
        "skypilot: {image: theirs}",
        "skypilot: {secrets: [HF_TOKEN]}",
        "skypilot: {workdir: .}",
        'skypilot: {file_mounts: {/a: "s3://theirs"}}',
    ],
)
def test_a_file_decides_neither_what_runs_nor_where_data_goes(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"model: tiny\ndata: random\n{text}\n")
    section, name = re.findall(r"^(\w+): \{(\w+)", text)[0]
    with pytest.raises(ConfigError, match=rf"{section}\.{name}"):
        load_config(["--config", str(tmp_path / "run.yaml")])


def script_of(folder: Path, *typed: str) -> str:
    document = printed_documents(folder, *KUBERNETES, *typed)[-1]
    return str(document["spec"]["template"]["spec"]["containers"][0]["command"][-1])


def environment(**more: str) -> dict[str, str]:
    path = f"{SCRIPT.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return child_environment() | {"PATH": path} | more


def test_an_evicted_pod_saves_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """The script itself, by the shell, with SIGTERM to what is the pod's first process."""
    folder = tmp_path / "it's shared"
    long = ["training.max_steps=100000", "training.micro_batch_size=1", "training.global_batch_size=1"]
    typed = [f"kubernetes.mount_path={tmp_path}", f"run.folder={folder}/one", "kubernetes.setup=[export A=1]"]
    script = script_of(tmp_path, *long, *typed)
    assert script.startswith("export A=1\n")
    pod = subprocess.Popen(["bash", "-ec", script], env=environment(), cwd=tmp_path, stdout=subprocess.DEVNULL)
    while read_run(folder / "one").step is None:
        assert pod.poll() is None
        time.sleep(0.2)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait() == 143
    stopped = read_run(folder / "one")
    assert stopped.status == "interrupted" and stopped.checkpoint is not None and stopped.step is not None
    more = [f"training.max_steps={stopped.step + 1}", "checkpoint.allow_changes=[training.max_steps]"]
    script = script_of(tmp_path, *long, *typed, *more)
    done = subprocess.run(["bash", "-ec", script], env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_run(folder / "one").step == stopped.step + 1


def test_two_nodes_meet_and_train_one_run(tmp_path: Path) -> None:
    """Two scripts on this host, which know one another by the names that a cluster gives them."""
    typed = [f"kubernetes.mount_path={tmp_path}", f"run.folder={tmp_path}/one", "kubernetes.nodes=2"]
    script = script_of(tmp_path, *typed, "run.name=two")
    assert "main_process_ip: qlora-two-0.qlora-two" in script
    script = script.replace("qlora-two-0.qlora-two", "127.0.0.1")
    pods = []
    for number in range(2):
        variables = environment(JOB_COMPLETION_INDEX=str(number), QLORA_FSDP_RUN_KEY="0" * 32)
        pods.append(subprocess.Popen(["bash", "-ec", script], env=variables, cwd=tmp_path))
    assert [pod.wait() for pod in pods] == [0, 0]
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["num_ranks"] == 2


def write_stand_in(folder: Path, name: str) -> Path:
    """A command that keeps what it was given."""
    folder.mkdir()
    file = folder / name
    file.write_text(
        f'#!/bin/sh\nPATH=/bin:/usr/bin\necho "$@" >>{folder}/words\nfor last; do :; done\n'
        f"cat $last >>{folder}/given\necho $QLORA_FSDP_RUN_KEY >>{folder}/key\n"
    )
    file.chmod(0o755)
    return folder


def submit(folder: Path, stand_in: Path, *typed: str, **variables: str) -> subprocess.CompletedProcess[str]:
    real = [text for text in RUN if not text.startswith("launch.")]
    own = environment(**variables)
    own["PATH"] = str(stand_in)  # and no program of this machine, which might know a cluster
    command = [sys.executable, str(SCRIPT), "train", *real, *typed]
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)


def test_jobs_go_to_kubectl_with_a_secret_of_their_own(tmp_path: Path) -> None:
    stand_in = write_stand_in(tmp_path / "bin", "kubectl")
    done = submit(tmp_path, stand_in, *KUBERNETES, SHARED, "kubernetes.nodes=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Submitted qlora-run. To look at it: kubectl get pods" in done.stdout + done.stderr
    assert (stand_in / "words").read_text() == "create -f -\n"
    secret, *others = yaml.safe_load_all((stand_in / "given").read_text())
    assert [each["kind"] for each in others] == ["Service", "Job"]
    assert re.fullmatch(r"[0-9a-f]{32}", secret["stringData"]["QLORA_FSDP_RUN_KEY"])
    check_kubernetes(secret)
    assert {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in (secret, *others)} == {"qlora-run"}


def test_a_job_that_is_there_is_not_submitted_again(tmp_path: Path) -> None:
    """`kubectl apply` would change nothing of it, and say so with success; its key would change while it runs."""
    stand_in = write_stand_in(tmp_path / "bin", "kubectl")
    told = 'Error from server (AlreadyExists): jobs.batch "qlora-run" already exists'
    (stand_in / "kubectl").write_text(f"#!/bin/sh\necho secret/qlora-run-key created\necho '{told}' >&2\nexit 1\n")
    done = submit(tmp_path, stand_in, *KUBERNETES, SHARED)
    assert "It has also said: secret/qlora-run-key created." in done.stderr
    assert done.returncode == 2 and "Kubernetes has qlora-run already, running or finished" in done.stderr
    assert "kubectl delete jobs,services,secrets -l 'app.kubernetes.io/instance in (qlora-run)'" in done.stderr


def test_the_images_user_may_write_to_a_fresh_volume() -> None:
    """A volume is root's at first: its group is that of the Dockerfile's user."""
    user = re.search(r"useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert user is not None and int(user[1]) == IMAGE_USER


def test_jobs_go_to_skypilot_with_secrets_by_name(tmp_path: Path) -> None:
    stand_in = write_stand_in(tmp_path / "bin", "sky")
    typed = [*SKYPILOT, SHARED, "skypilot.secrets=[MY_TOKEN]", "skypilot.num_nodes=2"]
    done = submit(tmp_path, stand_in, *typed)
    assert done.returncode == 2 and "skypilot.secrets names MY_TOKEN, which is no variable here" in done.stderr
    done = submit(tmp_path, stand_in, *typed, MY_TOKEN="not to be written")
    assert done.returncode == 0, done.stdout + done.stderr
    words = (stand_in / "words").read_text()
    assert words.startswith("jobs launch --yes --async --secret MY_TOKEN --secret QLORA_FSDP_RUN_KEY /")
    assert "not to be written" not in (stand_in / "given").read_text() + words
    assert re.fullmatch(r"[0-9a-f]{32}\n", (stand_in / "key").read_text())


@pytest.mark.parametrize(("typed", "program"), [(KUBERNETES, "kubectl"), (SKYPILOT, "sky")])
def test_a_program_that_is_not_here_is_named(typed: list[str], program: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = submit(tmp_path, tmp_path / "empty", *typed, SHARED)
    assert done.returncode == 2 and re.search(rf"needs .*{program}.*which is not here", done.stderr), done.stderr
    assert "launch.dry_run=true prints the" in done.stderr


@pytest.mark.parametrize(
    ("typed", "fix"), [(KUBERNETES, "copy it to the volume of"), (SKYPILOT, "put it into a bucket")]
)
def test_files_that_are_on_this_host_alone_are_told(typed: list[str], fix: str, tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")

    def told(*more: str) -> str:
        command = [sys.executable, str(SCRIPT), "train", *RUN, *typed, SHARED, *more]
        done = subprocess.run(command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert f"Note: data.path=rows.jsonl is on this host alone. Unless the image has it, {fix}" in told(
        "data=rows.jsonl"
    )
    assert "on this host alone" not in told()
    if typed is SKYPILOT:
        assert "on this host alone" not in told("data=rows.jsonl", f"skypilot.workdir={tmp_path}")


def test_programs_and_adapters_that_are_on_this_host_alone_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home is written as ~ in the folder that SkyPilot copies, too."""
    (tmp_path / "rewards.py").write_text("")
    (tmp_path / "judge").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    reward = ["reward.functions=[rewards.py:good,exact_match]", "reward.models=[judge]"]
    distill = ["task=distill", "distill.teacher_adapter=judge"]
    for typed, paths in ((["task=grpo", *reward], ["rewards.py", "judge"]), (distill, ["judge"])):
        jobs = [Job({}, load_config(["model=tiny", "data=rows.jsonl", *typed]), typed, Path("run"))]
        notes = notes_on_files_left_here(jobs, [], "copy it.", workdir=None)
        assert [note.partition(" is on")[0].partition("=")[2] for note in notes] == paths
        assert notes_on_files_left_here(jobs, [], "copy it.", workdir="~") == []


def test_every_path_of_the_dockerfile_is_there() -> None:
    """What can be checked without an engine: its instructions, its paths, the pinned image, and what is installed."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    names = [name for name, _ in lines]
    assert names[0] == "FROM" and set(names) <= {"FROM", "RUN", "WORKDIR", "COPY", "USER", "CMD"}
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", lines[0][1])
    copied = set()
    for name, rest in lines:
        if name == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
            copied |= set(sources)
    # All that the build asks for, by pyproject.toml.
    project = (ROOT / "pyproject.toml").read_text()
    assert 'readme = "README.md"' in project and 'license-files = ["LICENSE"]' in project
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "src", "conf", "accelerate_configs"} == copied
    (installed,) = [rest for name, rest in lines if name == "RUN" and "pip install" in rest]
    assert '-c constraints.txt ".[gpu]"' in installed
    assert json.loads(lines[-1][1]) == ["qlora-fsdp", "doctor"]
