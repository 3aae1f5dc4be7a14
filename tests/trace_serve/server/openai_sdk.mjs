// What the official SDK for Node makes of the front-end's answers; prints one JSON object.
import OpenAI from "openai";

const baseURL = process.env.BASE_URL;
const client = new OpenAI({ baseURL, apiKey: process.env.API_KEY, maxRetries: 0 });
const tool = JSON.parse(process.env.TOOL);
const say = (content) => ({ model: "scripted", messages: [{ role: "user", content }] });

async function errorOf(work) {
  try {
    await work();
  } catch (error) {
    return [error.constructor.name, error.param ?? null];
  }
  return null;
}

async function drain(stream) {
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices.map((choice) => choice.delta.content ?? "").join("");
    usage = chunk.usage ?? usage;
  }
  return { text, usage };
}

const chat = await client.chat.completions.create(say("tokens=2"));
const streamed = await drain(
  await client.chat.completions.create({ ...say("tokens=3"), stream: true, stream_options: { include_usage: true } }),
);
const completion = await client.completions.create({ model: "scripted", prompt: "tokens=1" });
const models = await client.models.list();

const question = say("tokens=1 arguments={}");
const called = await client.chat.completions.create({ ...question, tools: [tool], tool_choice: "required" });
const message = called.choices[0].message;
const answered = await client.chat.completions.create({
  model: "scripted",
  messages: [
    ...question.messages,
    message,
    { role: "tool", tool_call_id: message.tool_calls[0].id, content: "tokens=1" },
  ],
  tools: [tool],
  tool_choice: "none",
});
const { data, response } = await client.chat.completions
  .create({ ...say("tokens=1"), return_rollout: true })
  .withResponse();

const errors = {
  n: await errorOf(() => client.chat.completions.create({ ...say("tokens=1"), n: 0 })),
  model: await errorOf(() => client.chat.completions.create({ ...say("tokens=1"), model: "gpt" })),
  weights: await errorOf(() => client.chat.completions.create({ ...say("tokens=1"), weight_version: "other" })),
  key: await errorOf(() => new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }).models.list()),
  engine: await errorOf(() => client.chat.completions.create(say("status=500"))),
  cut: await errorOf(async () =>
    drain(await client.chat.completions.create({ ...say("tokens=4 error_after=2"), stream: true })),
  ),
};

console.log(
  JSON.stringify({
    chat: chat.choices[0].message.content,
    stream: streamed.text,
    usage: streamed.usage.completion_tokens,
    completion: completion.choices[0].text,
    models: models.data.map((model) => model.id),
    tool: message.tool_calls[0].function.name,
    after_tool: answered.choices[0].message.content,
    rollout: data.metadata.trace_rollout[0].output_token_ids.length > 0,
    weights: response.headers.get("x-trace-weight-version"),
    errors,
  }),
);
