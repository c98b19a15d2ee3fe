"""A coding agent of the standard library: `python3 command_agent.py PROMPT`, with the variables of OpenAI's SDK.

Its model has the tool `bash`. It ends with the exit code that `--exit` gives, before its first request with `--silent`.
"""

import json
import os
import subprocess
import sys
import urllib.request


def ask(messages):
    tool = {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
    body = {"model": "m", "messages": messages, "tools": [{"type": "function", "function": tool}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def main(prompt, *options):
    messages = [{"role": "user", "content": prompt}]
    if "--silent" in options:
        print("nothing to do")
        return
    while True:
        messages.append(message := ask(messages))
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
    if "--exit" in options:
        sys.exit(int(options[-1]))


main(*sys.argv[1:])
