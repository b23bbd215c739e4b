"""An agent in its own program: it takes an address, a sum and a key, and prints its reward."""

import json
import sys
import urllib.request

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def main(base_url: str, task: str, api_key: str) -> float:
    messages = [{"role": "user", "content": f"What is {task}?"}]
    a, _, b = task.split()
    for _ in range(4):
        request = urllib.request.Request(
            f"{base_url}/chat/completions",
            json.dumps({"messages": messages, "tools": [TOOL]}).encode(),
            {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            reply = json.load(answer)["choices"][0]["message"]
        messages.append(reply)
        if not reply.get("tool_calls"):
            return float(str(int(a) + int(b)) in reply["content"])
        for call in reply["tool_calls"]:
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": str(int(a) + int(b))}
            )
    return 0.0


if __name__ == "__main__":
    sys.stdout.write(str(main(*sys.argv[1:])))
