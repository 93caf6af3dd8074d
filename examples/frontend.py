"""An SGLang frontend program on a DSPARK server: a fork of two tips, and a choice between two answers.

python -m examples.frontend --url http://127.0.0.1:30000
"""

import argparse

import sglang as sgl


@sgl.function
def travel(s, place: str):
    """Two tips written side by side, then a summary of both, then a choice."""
    s += sgl.user(f"I will visit {place} for a day.")
    forks = s.fork(2)
    for fork, topic in zip(forks, ("food", "walking"), strict=True):
        fork += sgl.user(f"Give me one tip about {topic}, in a sentence.")
        fork += sgl.assistant(sgl.gen("tip", max_tokens=32, temperature=0))
    s += sgl.assistant(f"Food: {forks[0]['tip']}\nWalking: {forks[1]['tip']}")
    s += sgl.user("Which of the two matters more on a rainy day?")
    s += sgl.assistant(sgl.gen("choice", choices=["food", "walking"]))


def main() -> None:
    """Run the program and print what it said."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--place", default="Lisbon")
    args = parser.parse_args()
    sgl.set_default_backend(sgl.RuntimeEndpoint(args.url))
    state = travel.run(place=args.place)
    print(state.text())
    print("choice:", state["choice"])


if __name__ == "__main__":
    main()
