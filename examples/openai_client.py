"""The OpenAI client against a DSPARK server: nothing about it is different.

python -m examples.openai_client --url http://127.0.0.1:30000
"""

import argparse

from openai import OpenAI


def main() -> None:
    """One streamed chat answer, printed as it comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--prompt", default="Name three things to check before a long bicycle ride.")
    args = parser.parse_args()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": args.prompt}],
        temperature=0,
        max_tokens=64,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
