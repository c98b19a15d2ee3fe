"""Talks in three turns: `solve`, `agent.py PROMPT` with the variables of OpenAI's SDK, or `agent.py serve GATEWAY`."""

import asyncio
import json
import os
import sys
import urllib.request
import zlib
from collections.abc import Iterator
from typing import Any


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.loads(answer.read() or "null")


def grade(replies: list[str]) -> float:
    return zlib.crc32(json.dumps(replies).encode()) % 1000 / 1000


def talk(base_url: str, key: str, messages: list[Any], replies: list[str]) -> Iterator[list[str]]:
    for question in ("salt", "water", None):
        choice = post(base_url + "/chat/completions", key, {"model": "policy", "messages": messages})["choices"][0]
        replies.append(choice["message"]["content"])
        yield replies
        if choice["finish_reason"] != "stop":
            break  # a cut reply may be no prefix of the next prompt
        messages = [*messages, choice["message"], {"role": "user", "content": question}]


async def solve(messages: list[Any], base_url: str, api_key: str) -> float:
    *_, replies = await asyncio.to_thread(list, talk(base_url, api_key, messages, []))
    return grade(replies)


if __name__ == "__main__" and sys.argv[1] == "serve":
    while True:
        if rollout := post(sys.argv[2] + "/rollouts", "", {}):
            key, url = rollout["api_key"], sys.argv[2] + "/rollouts/" + rollout["id"]
            *_, replies = talk(rollout["base_url"], key, rollout["messages"], [])
            post(url + "/reward", key, {"reward": grade(replies)})
elif __name__ == "__main__":
    prompt = [{"role": "user", "content": sys.argv[1]}]
    for replies in talk(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], prompt, []):
        with open("/app/replies.json", "w") as file:
            json.dump(replies, file)
