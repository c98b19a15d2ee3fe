"""What of a classic environment's calls of the model is trained on, and how they are sampled."""

import asyncio
import copy
import json
import os

import numpy as np
import openai
import pytest
import verifiers as vf
from datasets import Dataset
from verifiers.types import TrajectoryStep

from prime_rl.core.errors import ConfigError
from prime_rl.core.types import Credit
from prime_rl.rollouts import group_attempts
from prime_rl.rollouts.group_attempts import EnvironmentFailed, SampleTooLong
from tests.support.virtual_clock import virtual_clock
from tests.unit.rollouts.conftest import RUN, TOKENIZER, NumberingEngine, encode


class Chat(vf.MultiTurnEnv):
    """Says "again" after each answer, until `max_turns`."""

    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="again")]


def rewarded(completion):
    return 1.0


def dataset():
    return Dataset.from_list([{"question": "say it", "answer": "1"}])


def make(kind=Chat, rubric=None, max_turns=2, **kwargs):
    turns = {"max_turns": max_turns} if issubclass(kind, vf.MultiTurnEnv) else {}
    return kind(dataset=dataset(), rubric=rubric or vf.Rubric(funcs=[rewarded]), **turns, **kwargs)


def trained(rollout):
    """The words that are trained on, of each sample."""
    return [TOKENIZER.decode(sample.tokens[sample.loss_mask], skip_special_tokens=True) for sample in rollout.samples]


# Sampling parameters of the environment's own


async def test_sampling_args_that_are_no_dictionary_raise(play_classic):
    class Odd(Chat):
        async def setup_state(self, state):
            state["sampling_args"] = ["temperature"]

    with pytest.raises(EnvironmentFailed, match=r"sampling_args is .*, not a dictionary"):
        await play_classic(make(Odd))


@pytest.mark.parametrize(
    ("said", "stop", "min_tokens", "text"),
    [
        ("a b c b", "b", 0, "a "),
        ("a b c b", "b", 4, "a b c "),
        ("a b c b", ["b", "c"], 4, "a b "),
        ("abcabc", "bca", 0, "a"),
        ("abcabc", "cab", 4, "ab"),  # it begins before, and ends after
        ("abcabc", "abc", 3, "abc"),
        ("abcabc", "bc", 20, "abcabc"),
        ("abc", "x", 2, "abc"),
        ("abc", ["abc", "b"], 0, "a"),  # the engine stops at the one that ends first
    ],
)
async def test_stop_string_before_min_tokens_stays_in_the_text(play_classic, said, stop, min_tokens, text):
    """vLLM looks for stop strings in what follows the first `min_tokens` tokens; here each character is one."""
    assert len(encode(said)) == len(said) + 1
    env = make(max_turns=1, sampling_args={"stop": stop})
    (rollout,) = await play_classic(env, sampling={**RUN, "min_tokens": min_tokens}, says=lambda asked: said)
    assert rollout.text[-1] == ("assistant", text)
    assert rollout.samples[0].loss_mask.sum() == len(said) + 1, "all that was sampled is trained"


async def test_min_tokens_is_lowered_to_the_available_tokens(play_classic, load_classic):
    length = load_classic(make()).prompt_tokens(0)
    await play_classic(make(max_turns=1), seq_len=length + 6, sampling={**RUN, "min_tokens": 10})
    assert (play_classic.engine.asked[0]["max_tokens"], play_classic.engine.asked[0]["min_tokens"]) == (6, 6)
    await play_classic(make(max_turns=1), sampling={**RUN, "min_tokens": 10})
    assert (play_classic.engine.asked[0]["max_tokens"], play_classic.engine.asked[0]["min_tokens"]) == (20, 10)


# Calls that are no turn of the trajectory


class Simulated(Chat):
    """The policy plays its own user."""

    async def env_response(self, messages, state, **kwargs):
        asked = [vf.UserMessage(content=f"play the user, {len(state['trajectory'])}")]
        response = await self.get_model_response(state, asked, sampling_args={"max_tokens": 7})
        return [vf.UserMessage(content=response.message.content)]


class SelfJudging(Chat):
    """Judges the last answer in the same conversation; then the conversation goes on without that."""

    async def add_model_response(self, state, prompt_messages, response):
        await super().add_model_response(state, prompt_messages, response)
        conversation = [*prompt_messages, response.message, vf.UserMessage(content="was that right?")]
        await self.get_model_response(state, conversation)


class Forgetting(Chat):
    """Takes the first turn out of the trajectory when the second is there."""

    async def add_model_response(self, state, prompt_messages, response):
        await super().add_model_response(state, prompt_messages, response)
        if len(state["trajectory"]) == 2:
            del state["trajectory"][0]
            state["final_env_response"] = [vf.UserMessage(content="enough")]


class Copying(Chat):
    """Has copies of its steps."""

    async def add_trajectory_step(self, state, trajectory_step):
        state["trajectory"].append(copy.deepcopy(trajectory_step))


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        (Chat, ["answer 0answer 1answer 2"]),
        (Simulated, ["answer 0answer 2answer 4"]),
        (SelfJudging, ["answer 0answer 2answer 4"]),
        (Copying, ["answer 0answer 1answer 2"]),
        (Forgetting, ["answer 1"]),
    ],
)
async def test_only_turns_in_the_trajectory_are_trained(play_classic, kind, answers):
    (rollout,) = await play_classic(make(kind, max_turns=3), keep_messages=True)
    assert trained(rollout) == answers
    assert rollout.completion_tokens == sum(int(sample.loss_mask.sum()) for sample in rollout.samples)
    for sample in rollout.samples:
        assert (sample.versions >= 0).tolist() == sample.loss_mask.tolist()


async def test_call_outside_the_trajectory_that_a_turn_extends_is_its_context(play_classic):
    class Thinking(Chat):
        """A turn begins with a call whose answer stays in the conversation."""

        async def get_prompt_messages(self, state):
            thought = await self.get_model_response(state, state["prompt"])
            return [*state["prompt"], thought.message, vf.UserMessage(content="and now?")]

    (rollout,) = await play_classic(make(Thinking, max_turns=1))
    (sample,) = rollout.samples
    assert trained(rollout) == ["answer 1"]
    assert "answer 0" in TOKENIZER.decode(sample.tokens)


async def test_replies_of_another_model_in_the_trajectory_are_not_trained(play_classic):
    class Mixed(Chat):
        async def get_model_response(self, state, prompt, **kwargs):
            response = await super().get_model_response(state, prompt, **kwargs)
            if len(state["trajectory"]) == 0:
                response = response.model_copy(update={"id": "chatcmpl-7"})  # as one of another server
            return response

    (rollout,) = await play_classic(make(Mixed))
    assert trained(rollout) == ["answer 1"]


@pytest.mark.parametrize(
    ("kind", "cut", "truncated"),
    [(Chat, {0}, True), (Chat, {1}, True), (Chat, {2}, True), (Chat, (), False), (Simulated, {1}, False)],
)
async def test_rollout_is_truncated_if_any_turn_is(play_classic, kind, cut, truncated):
    (rollout,) = await play_classic(make(kind, max_turns=3), cut=cut)
    assert rollout.is_truncated is truncated


async def test_too_long_auxiliary_prompt_does_not_truncate_the_rollout(play_classic):
    class Verbose(Chat):
        async def env_response(self, messages, state, **kwargs):
            with pytest.raises(vf.OverlongPromptError):
                await self.get_model_response(state, [vf.UserMessage(content="word " * 500)])
            return [vf.UserMessage(content="again")]

    (rollout,) = await play_classic(make(Verbose))
    assert not rollout.is_truncated and rollout.metrics["num_turns"] == 2


# Masks and tokens of steps


async def test_tokens_beyond_the_environments_max_seq_len_are_not_trained(play_classic, load_classic):
    env = make(max_turns=1)
    env.set_max_seq_len(load_classic(env).prompt_tokens(0) + 2)
    (rollout,) = await play_classic(env)
    assert rollout.samples[0].loss_mask.sum() == 2
    assert rollout.is_truncated


async def test_changed_completion_ids_raise(play_classic):
    class Rewriting(Chat):
        async def add_trajectory_step(self, state, trajectory_step):
            trajectory_step["tokens"]["completion_ids"] = [5, 6]
            trajectory_step["tokens"]["completion_mask"] = [1, 1]
            await super().add_trajectory_step(state, trajectory_step)

    with pytest.raises(EnvironmentFailed, match="changes `completion_ids`"):
        await play_classic(make(Rewriting))


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
async def test_tokens_of_a_step_behave_as_lists_and_responses_can_be_dumped(play_classic):
    def looks(state):
        first, second = (step["tokens"] for step in state["trajectory"])
        context = first["prompt_ids"] + first["completion_ids"]
        assert second["prompt_ids"][: len(context)] == context
        assert [*context][-1] == first["completion_ids"][-1] == 2
        assert list(first["completion_logprobs"]) == [-0.5] * len(first["completion_ids"])
        assert np.array(first["prompt_mask"]).tolist() == [0] * len(first["prompt_ids"])
        assert copy.deepcopy(first["completion_mask"]) == [1] * len(first["completion_ids"])
        with pytest.raises(TypeError):
            first["completion_mask"][0] = 0
        dumped = json.loads(state["trajectory"][0]["response"].model_dump_json())["message"]["tokens"]
        assert dumped["prompt_ids"] + dumped["completion_ids"] == context
        return 1.0

    (rollout,) = await play_classic(make(rubric=vf.Rubric(funcs=[looks])))
    assert rollout.reward == 1.0


# What cannot be done is said


class Single(vf.Environment):
    """An environment with a rollout() of its own."""

    async def rollout(self, input, client, model, sampling_args=None):
        state = await self.init_state(input, client, model, sampling_args)
        await self.talk(state)
        state["is_completed"] = True
        return state


class Scripted(Single):
    async def talk(self, state):
        state["completion"] = [vf.AssistantMessage(content="written by a script")]


class Trackless(Single):
    async def talk(self, state):
        response = await self.get_model_response(state, state["prompt"])
        state["completion"] = [response.message]


class Own(Single):
    async def talk(self, state):
        response = await self.get_model_response(state, state["prompt"])
        state["completion"] = response.message.content
        step = TrajectoryStep(prompt=state["prompt"], response=response, tokens=None, reward=None, advantage=None)
        state["trajectory"].append(step)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Scripted, "never called its client"),
        (Trackless, "the model answered 1 calls, but no answer is the `response` of a step"),
    ],
)
async def test_environment_without_trainable_turns_raises_with_the_reason(play_classic, kind, message):
    with pytest.raises(EnvironmentFailed, match=message) as raised:
        await play_classic(make(kind))
    assert "\n" not in str(raised.value)


async def test_environment_with_its_own_rollout_is_trained_by_its_trajectory(play_classic):
    (rollout,) = await play_classic(make(Own))
    assert trained(rollout) == ["answer 0"]
    assert rollout.text == (("user", "say it"), ("assistant", "answer 0"))


# Scores


class Alone(vf.Rubric):
    """Overrides `score_rollout` and nothing else."""

    async def score_rollout(self, state):
        state["reward"] = 0.25 * len(state["trajectory"])
        state["metrics"] = {"mine": 3.0}


class AloneInGroup(vf.RubricGroup):
    async def score_rollout(self, state):
        state["reward"], state["metrics"] = 0.75, {}


class Together(Alone):
    """Overrides both: the group's is asked, as verifiers does."""

    async def score_group(self, states):
        for state in states:
            state["reward"], state["metrics"] = 2.0, {}


@pytest.mark.parametrize(
    ("rubric", "reward"),
    [
        (Alone(), 0.5),
        (vf.RubricGroup([Alone(), vf.Rubric([rewarded])]), 1.5),
        (AloneInGroup([vf.Rubric([rewarded])]), 0.75),
        (Together(), 2.0),
    ],
)
async def test_rubric_with_only_score_rollout_is_called(play_classic, rubric, reward):
    rollouts = await play_classic(make(rubric=rubric), count=2)
    assert [rollout.reward for rollout in rollouts] == [reward] * 2


@virtual_clock
async def test_answer_that_exceeds_the_grading_timeout_fails_instead_of_scoring_0(play_classic):
    """As MathRubric does it: what waits longer for its process pool counts 0, without an exception."""

    class Grading(vf.Rubric):
        HARD_TIMEOUT_SECONDS = 5

        async def correct(self, completion):
            await asyncio.sleep(2 * self.HARD_TIMEOUT_SECONDS)
            return 0.0

    rubric = Grading()
    rubric.add_reward_func(rubric.correct)
    with pytest.raises(EnvironmentFailed, match="reward function correct did not end within 5 s: its process pool is"):
        await play_classic(make(rubric=rubric))


class WithAdvantages(vf.Rubric):
    has_advantages = True


def test_rubric_with_advantages_raises_for_training(load_classic):
    env = vf.EnvGroup([make(), make(rubric=WithAdvantages(funcs=[rewarded]))])
    with pytest.raises(ConfigError, match=r"computes advantages .*orchestrator\.advantage"):
        load_classic(env)
    assert len(load_classic(env, keep_messages=True)) == len(load_classic(env, split="eval")) == 2


class StepRewarding(Chat):
    name = "reward"

    async def add_trajectory_step(self, state, trajectory_step):
        trajectory_step[self.name] = 0.5
        await super().add_trajectory_step(state, trajectory_step)


class StepAdvantages(StepRewarding):
    name = "advantage"


class StateAdvantage(Chat):
    value = 1.0

    async def setup_state(self, state):
        state["advantage"] = self.value


async def test_step_rewards_and_advantages_log_one_warning(play_classic):
    rollouts = await play_classic(make(StepRewarding), count=2)
    (warning,) = play_classic.warnings
    assert "sets `reward` of single steps" in warning and "step_rewards" in warning
    assert rollouts[0].credits == ()
    play_classic.warnings.clear()
    (rollout,) = await play_classic(make(StateAdvantage))
    assert rollout.credits == (Credit("", 1.0, 1.0),) and rollout.samples[0].credits is None
    assert play_classic.warnings == ["it sets advantages itself, which are trained on instead of computed ones"]
    assert (await play_classic(make(StepAdvantages), keep_messages=True))[0].reward == 1.0


class MaskedStart(StepAdvantages):
    async def add_trajectory_step(self, state, trajectory_step):
        if not state["trajectory"]:
            tokens = trajectory_step["tokens"]
            trajectory_step["tokens"] = {**tokens, "completion_mask": [0] * len(tokens["completion_ids"])}
        await super().add_trajectory_step(state, trajectory_step)


async def test_turn_that_the_environment_masks_is_not_trained_and_keeps_its_number(play_classic):
    (rollout,) = await play_classic(make(MaskedStart))
    assert trained(rollout) == ["answer 1"]
    assert [credit.name for credit in rollout.credits] == ["turn 1"]


@pytest.mark.parametrize("value", ["high", float("nan")])
async def test_environment_advantage_that_is_no_number_raises(play_classic, value):
    with pytest.raises(EnvironmentFailed, match=r"state\['advantage'\] is .*number"):
        await play_classic(make(type("Odd", (StateAdvantage,), {"value": value})))


def test_environment_that_overrides_group_methods_raises(load_classic):
    class Hooked(Chat):
        async def _run_group_states(self, *args):
            raise AssertionError("not called")

    class HookedGroup(vf.EnvGroup):
        async def rollout(self, *args):
            raise AssertionError("not called")

    with pytest.raises(ConfigError, match=r"overrides _run_group_states\(\) of Environment, which is not called"):
        load_classic(make(Hooked))
    with pytest.raises(ConfigError, match=r"overrides rollout\(\) of EnvGroup, which .*of the environments in the Env"):
        load_classic(vf.EnvGroup([HookedGroup([make()])]))
    patched = vf.EnvGroup([make()])
    patched.rollout = None
    with pytest.raises(ConfigError, match=r"overrides rollout\(\) of EnvGroup"):
        load_classic(patched)


@pytest.mark.parametrize("is_group", [False, True])
async def test_constructor_sampling_args_are_treated_as_those_of_a_call(play_classic, is_group):
    def given(**own):
        return vf.EnvGroup([make()], sampling_args=own) if is_group else make(sampling_args=own)

    await play_classic(given(stop=" 0", max_tokens=np.int64(7), temperature=0))
    for asked in play_classic.engine.asked:
        assert (asked["max_tokens"], asked["stop"], asked["temperature"]) == (7, [" 0"], 1)
    (warning,) = play_classic.warnings
    assert "temperature = 0)" in warning
    with pytest.raises(EnvironmentFailed, match="n > 1 is not supported"):
        await play_classic(given(n=4))


# Cleanup


class Cleaning(vf.Rubric):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.cleaned = []

    @vf.cleanup
    async def release(self, state):
        await asyncio.sleep(0)
        self.cleaned.append(state["trajectory_id"])


@pytest.mark.parametrize("where", ["turn", "score"])
@pytest.mark.parametrize("how", ["raises", "is cancelled"])
async def test_rubric_cleans_up_after_a_group_that_ends_early(play_classic, where, how):
    reached = asyncio.Event()

    async def end():
        reached.set()
        if how == "raises":
            raise KeyError("broken")
        await asyncio.Event().wait()

    class Ending(Chat):
        async def env_response(self, messages, state, **kwargs):
            await end()

    async def score(completion):
        await end()

    rubric = Cleaning(funcs=[score if where == "score" else rewarded])
    group = asyncio.create_task(play_classic(make(Ending if where == "turn" else Chat, rubric=rubric), count=2))
    await asyncio.wait_for(reached.wait(), 60)
    if how == "is cancelled":
        group.cancel()
    with pytest.raises(EnvironmentFailed if how == "raises" else asyncio.CancelledError):
        await group
    assert len(set(rubric.cleaned)) == 2


async def test_failed_cleanup_logs_a_warning_and_keeps_the_group(play_classic):
    class Failing(vf.Rubric):
        @vf.cleanup
        async def release(self, state):
            raise KeyError("no such sandbox")

    (rollout,) = await play_classic(make(rubric=Failing(funcs=[rewarded])))
    assert rollout.reward == 1.0
    assert play_classic.warnings == ["the cleanup of its rubric failed: KeyError: 'no such sandbox'"]


# The raw client


SAY = {"role": "user", "content": "say it"}
TOOL = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


class AskedTheSame(Single):
    """Has a system prompt, which the completion lacks, and a judge that is asked what a user says."""

    async def talk(self, state):
        create = state["client"].client.chat.completions.create
        messages = [SAY]
        for said in ("no", "ok", "ok"):
            reply = await create(model="m", messages=[{"role": "system", "content": "Be brief."}, *messages])
            if len(messages) == 1:
                await create(model="m", messages=[{"role": "user", "content": "no"}])
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": said})
        state["completion"] = messages[1:-1]


def answers_alike(asked):
    return "no" if asked.count("assistant") == 1 and "say" in asked else "yes"


async def test_raw_client_with_an_ambiguous_completion_is_refused(play_classic):
    """Another turn with the same text does not make room for the judge's answer."""
    with pytest.raises(EnvironmentFailed, match="2 calls were answered with the same message"):
        await play_classic(make(AskedTheSame), says=answers_alike)


# Other calls of the policy whose answers equal its replies


class Conversation(Single):
    """A conversation of `turns`; in each, a call plays the user and sees the roles exchanged, and a judge is asked.

    Attributes:
        routes: of the policy, the user and the judge: raw, own (client) or classic.
        repeats: number of calls for each reply of the policy; the last one is taken.
    """

    routes = ("raw", "raw", "raw")
    turns = 3
    repeats = 1
    keeps = ("role", "content", "tool_calls")
    extra = ()
    request = {}  # noqa: RUF012

    async def ask(self, state, route, messages):
        if route == "classic":
            response = await self.get_model_response(state, messages)
            return {"role": "assistant", "content": response.message.content}
        client = state["client"].client
        if route == "own":
            client = openai.AsyncOpenAI(base_url=state["client"].base_url, api_key=state["client"].api_key)
        reply = await client.chat.completions.create(model="m", messages=[*self.extra, *messages], **self.request)
        message = reply.choices[0].message.model_dump(exclude_none=True)
        return {name: value for name, value in message.items() if name in self.keeps}

    async def talk(self, state):
        policy, user, judge = self.routes
        messages = [{"role": "user", "content": "say it"}]
        for _ in range(self.turns):
            for _ in range(self.repeats):
                reply = await self.ask(state, policy, messages)
            messages.append(reply)
            turned = {"user": "assistant", "assistant": "user"}
            seen = [{"role": turned[one["role"]], "content": str(one["content"])} for one in messages]
            said = await self.ask(state, user, [{"role": "user", "content": "Be a user."}, *seen])
            await self.ask(state, judge, [{"role": "user", "content": f"Good? {reply['content']}"}])
            messages.append({"role": "user", "content": said["content"]})
        state["completion"] = messages[1:-1]


def role_of(asked):
    """Return who is asked in a prompt."""
    return "judge" if "Good?" in asked else "user" if "Be a user." in asked else "policy"


def trained_contexts(rollout):
    """Return the text before each trained reply, and the replies."""
    found = []
    for sample in rollout.samples:
        mask = np.append(sample.loss_mask, False)
        for start in np.flatnonzero(mask & ~np.insert(mask[:-1], 0, False)):
            stop = start + int(np.argmin(mask[start:]))
            found.append((TOKENIZER.decode(sample.tokens[:start]), TOKENIZER.decode(sample.tokens[start : stop - 1])))
    return found


COLLISIONS = {
    "always equal": lambda asked: "yes",
    "empty": lambda asked: "",
    "user says it earlier": lambda asked: "yes" if role_of(asked) == "user" else f"{asked.count('assistant')}"[:1],
    "user repeats the policy": lambda asked: {"policy": "ok", "user": "ok", "judge": "no"}[role_of(asked)],
    "judge repeats the policy": lambda asked: {"policy": "1", "user": "go on", "judge": "1"}[role_of(asked)],
}


@pytest.mark.extended(after=12)
@pytest.mark.parametrize("says", COLLISIONS.values(), ids=COLLISIONS)
@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 3),
        ({"turns": 1}, 1),
        ({"repeats": 3}, 3),
        ({"routes": ("own", "own", "own")}, 3),
        ({"routes": ("raw", "classic", "own")}, 3),
        ({"routes": ("raw", "own", "classic"), "turns": 1}, 1),
        ({"extra": [{"role": "system", "content": "Be brief."}], "turns": 1}, 1),
    ],
)
async def test_calls_outside_the_completion_with_the_texts_of_replies_are_not_trained(
    play_classic, says, changes, count
):
    async def judge(state):
        await state["client"].client.chat.completions.create(model="m", messages=[SAY])
        return 1.0

    env = make(type("Talk", (Conversation,), changes), vf.Rubric(funcs=[judge]))
    rollouts = await play_classic(env, count=2, seq_len=4000, says=says)
    for rollout in rollouts:
        contexts = trained_contexts(rollout)
        assert [role_of(before) for before, _ in contexts] == ["policy"] * count
        assert len({before for before, _ in contexts}) == count
        assert [said for _, said in contexts] == [text for role, text in rollout.text if role == "assistant"]


async def test_raw_replies_that_the_environment_strips_are_trained(play_classic):
    class Stripping(Conversation):
        async def ask(self, state, route, messages):
            message = await super().ask(state, route, messages)
            return {**message, "content": message["content"].strip()}

    said = {"policy": "yes \n", "user": "yes", "judge": "no"}
    (rollout,) = await play_classic(make(Stripping), seq_len=4000, says=lambda asked: said[role_of(asked)])
    assert [(role_of(before), text) for before, text in trained_contexts(rollout)] == [("policy", "yes \n")] * 3


async def test_equal_tool_calls_of_other_calls_are_not_trained(play_classic):
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    for keeps in (Conversation.keeps, ("role", "content", "tool_calls", "reasoning_content")):
        kind = type("Talk", (Conversation,), {"request": {"tools": TOOL}, "turns": 1, "keeps": keeps})
        (rollout,) = await play_classic(make(kind), seq_len=4000, says=lambda asked: call)
        assert [(role_of(before), said) for before, said in trained_contexts(rollout)] == [("policy", call)]


class RawSimulated(Chat):
    """Plays the user through the raw client; the policy's turns are in the trajectory."""

    async def env_response(self, messages, state, **kwargs):
        client, asked = state["client"].client, [{"role": "user", "content": "Be a user."}]
        for _ in range(2):
            reply = await client.chat.completions.create(model="m", messages=asked)
        return [vf.UserMessage(content=reply.choices[0].message.content)]


@pytest.mark.parametrize("says", COLLISIONS.values(), ids=COLLISIONS)
async def test_raw_calls_beside_a_trajectory_are_not_trained(play_classic, says):
    async def judge(state):
        asked = [{"role": "user", "content": "Good?"}]
        await state["client"].client.chat.completions.create(model="m", messages=asked)
        return 1.0

    (rollout,) = await play_classic(make(RawSimulated, vf.Rubric(funcs=[judge]), 3), seq_len=4000, says=says)
    assert [role_of(before) for before, _ in trained_contexts(rollout)] == ["policy"] * 3


class Lists(Single):
    async def talk(self, state):
        await state["client"].client.models.list()


async def test_raw_client_has_chat_completions_only(play_classic):
    with pytest.raises(EnvironmentFailed, match="only chat completions are supported"):
        await play_classic(make(Lists))


@pytest.mark.parametrize("kind", [Own, Conversation])
async def test_environment_with_a_too_long_prompt_raises_sample_too_long(play_classic, kind):
    with pytest.raises(SampleTooLong):
        await play_classic(make(kind), seq_len=3)


class OwnClient(Single):
    """Builds its clients from the address and the key of the raw client; one of them uses a wrong key."""

    async def talk(self, state):
        endpoint = state["client"]
        self.key, self.url = endpoint.api_key, endpoint.base_url
        messages = [{"role": "user", "content": "say it"}]
        async with openai.AsyncOpenAI(base_url=self.url, api_key=self.key, max_retries=0) as mine:
            reply = await mine.chat.completions.create(model="m", messages=messages)
        async with openai.AsyncOpenAI(base_url=self.url, api_key="guess", max_retries=0) as other:
            with pytest.raises(openai.AuthenticationError, match="not that of a running rollout"):
                await other.chat.completions.create(model="m", messages=messages)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        state["completion"] = messages[1:]


async def test_own_client_is_served_until_the_group_ends(play_classic):
    environment = make(OwnClient)
    rollouts = await play_classic(environment, count=2)
    assert [len(trained(rollout)) for rollout in rollouts] == [1, 1]
    assert len(play_classic.engine.asked) == 2  # the wrong key reached no model
    async with openai.AsyncOpenAI(base_url=environment.url, api_key=environment.key, max_retries=0) as late:
        with pytest.raises(openai.AuthenticationError):
            await late.chat.completions.create(model="m", messages=[{"role": "user", "content": "say it"}])
    assert environment.url.startswith("http://127.0.0.1:")


async def test_own_client_needs_no_proxy(play_classic, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", ".example")
    monkeypatch.setenv("no_proxy", "")  # undone at the end
    (rollout,) = await play_classic(make(OwnClient))
    assert rollout.samples
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == ".example,127.0.0.1,localhost"


class Asking(Single):
    """Asks with an own client."""

    async def talk(self, state):
        async with openai.AsyncOpenAI(base_url=state["client"].base_url, api_key=state["client"].api_key) as mine:
            await mine.chat.completions.create(model="m", messages=self.messages)


@pytest.mark.parametrize("messages", [[{"content": "a"}], [1]])
async def test_own_client_with_messages_that_cannot_be_rendered_gets_one_line(play_classic, messages):
    environment = make(Asking)
    environment.messages = messages
    with pytest.raises(EnvironmentFailed, match=r"BadRequestError: .*400.*needs a role") as failure:
        await play_classic(environment)
    assert not failure.value.is_infrastructure


class Leaving(Single):
    """Its rollout ends while a request of its own client is running."""

    async def talk(self, state):
        client = openai.AsyncOpenAI(base_url=state["client"].base_url, api_key=state["client"].api_key, max_retries=0)
        messages = [{"role": "user", "content": "say it"}]
        self.request = asyncio.create_task(client.chat.completions.create(model="m", messages=messages))
        await self.asked.wait()
        raise KeyError("gave up")


async def test_own_client_requests_end_with_the_group(play_classic, monkeypatch):
    environment, cancelled = make(Leaving), asyncio.Event()
    environment.asked = asyncio.Event()

    async def generate(self, prompt_ids, sampling):
        environment.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    monkeypatch.setattr(NumberingEngine, "generate", generate)
    with pytest.raises(EnvironmentFailed, match="gave up"):
        await play_classic(environment)
    async with asyncio.timeout(30):
        await cancelled.wait()
    with pytest.raises(openai.APIConnectionError):
        await environment.request


class Talkative(Single):
    """Its first attempt fails; a task of each attempt continues to ask."""

    async def talk(self, state):
        async def ask(client=state["client"]):
            while True:
                await client.get_response(state["prompt"], "m", {})

        self.tasks.append(asyncio.create_task(ask()))
        await asyncio.sleep(0.01)
        if len(self.tasks) == 1:
            raise vf.InfraError("try again")
        assert self.tasks[0].done()
        state["completion"] = [{"role": "assistant", "content": "answer 0"}]


async def test_calls_of_tasks_that_an_attempt_leaves_are_refused(play_classic, monkeypatch):
    monkeypatch.setattr(group_attempts, "RETRY_PAUSE_SECONDS", 0.01)
    environment = make(Talkative)
    environment.tasks = []
    with pytest.raises(EnvironmentFailed, match="no answer is the `response`"):
        await play_classic(environment)
    async with asyncio.timeout(30):
        results = await asyncio.gather(*environment.tasks, return_exceptions=True)
    assert [str(result) for result in results] == ["the rollout of this client has ended"] * 2


class FirstStepRewarding(Chat):
    async def add_trajectory_step(self, state, trajectory_step):
        if not state["trajectory"]:
            trajectory_step["reward"] = 0.5
        await super().add_trajectory_step(state, trajectory_step)


async def test_scoring_that_is_repeated_sees_the_steps_as_the_environment_left_them(play_classic, monkeypatch):
    monkeypatch.setattr(group_attempts, "RETRY_PAUSE_SECONDS", 0.01)
    attempts = []

    def total(state):
        return sum(step["reward"] or 0.0 for step in state["trajectory"])

    def flaky(state):
        attempts.append(state)
        if len(attempts) == 1:
            raise vf.InfraError("the judge is overloaded")
        return 1.0

    rubric = vf.RubricGroup([vf.Rubric(funcs=[total]), vf.Rubric(funcs=[flaky])])
    (rollout,) = await play_classic(make(FirstStepRewarding, rubric=rubric))
    assert len(attempts) == 2 and rollout.reward == 1.5
