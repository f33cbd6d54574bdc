import torch

from recipes.generation.cpu_hybrid import RewindingGenerator


def draw(generator: torch.Generator) -> int:
    return int(torch.randint(0, 2**31, (1,), generator=generator))


def test_a_number_that_is_taken_back_is_drawn_again() -> None:
    plain = torch.Generator(device="cpu").manual_seed(5)
    numbers = [draw(plain) for _ in range(3)]
    generator = RewindingGenerator(device="cpu")
    generator.manual_seed(5)
    for _ in range(2):  # two parts of a prompt, each with a number too many
        assert draw(generator) == numbers[0]
        generator.set_offset(generator.get_offset() - 4)  # as vLLM does it
    assert [draw(generator) for _ in range(3)] == numbers
