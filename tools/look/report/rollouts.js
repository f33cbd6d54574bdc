"use strict";
// What models wrote is only ever put into text nodes: nothing here parses HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function element(tag, style, text) {
  const made = document.createElement(tag);
  if (style) made.className = style;
  if (text !== undefined) made.textContent = text;
  return made;
}

function fill(select, values, all) {
  if (all) select.append(new Option(all, ""));
  for (const value of values) select.append(new Option(String(value), String(value)));
}

const unique = (values) => [...new Set(values)];
const number = (value, digits) => (typeof value === "number" ? value.toFixed(digits) : "–");
const style = (reward) => (typeof reward !== "number" ? "bad" : reward >= 1 ? "good" : reward > 0 ? "warn" : "bad");
const advantage = (one) => (Array.isArray(one.group_advantages) ? one.group_advantages[one.member] : undefined);
const kinds = unique(data.map((one) => one.kind));
const panes = [];

function matches(one) {
  const text = byId("text").value.toLowerCase();
  const low = byId("low").value, high = byId("high").value;
  const shortest = byId("shortest").value, longest = byId("longest").value;
  const length = one.num_generated_tokens || 0;
  if (byId("agent").value && one.agent !== byId("agent").value) return false;
  if (byId("status").value && one.status !== byId("status").value) return false;
  if ((low || high) && typeof one.reward !== "number") return false;
  if (low && one.reward < Number(low)) return false;
  if (high && one.reward > Number(high)) return false;
  if (shortest && length < Number(shortest)) return false;
  if (longest && length > Number(longest)) return false;
  return !text || [one.prompt_text, one.output_text, one.reason].some((part) => part.toLowerCase().includes(text));
}

// Colour of a token: by how unlikely the engine found it, or by how many steps its weights were behind.
function shade(by, cost, age) {
  if (by === "cost") return cost ? `color-mix(in srgb, var(--c1) ${Math.round(70 * (1 - Math.exp(-cost / 100)))}%, transparent)` : "";
  return age > 0 ? `color-mix(in srgb, var(--c3) ${Math.min(70, 20 * age)}%, transparent)` : "";
}

function ages(one) {
  const trainedOn = one.kind === "train" ? one.step - 1 : one.step;
  return one.tokens.versions.flatMap(([version, count]) => Array(count).fill(trainedOn - version));
}

function answer(one) {
  const box = element("pre");
  const by = byId("colour").value, text = one.output_text;
  if (!text) box.append(element("span", "tok", "empty"));
  let at = 0;
  if (one.tokens && by) {
    const behind = ages(one);
    one.tokens.characters.forEach((length, index) => {
      const piece = element("span", "", text.slice(at, at + length));
      const cost = one.tokens.cost[index];
      piece.style.background = shade(by, cost, behind[index]);
      piece.title = `probability ${Math.exp(-cost / 100).toPrecision(2)} in the engine, weights ${behind[index]} steps behind`;
      box.append(piece);
      at += length;
    });
  }
  box.append(text.slice(at));
  return box;
}

function group(one, pane) {
  const section = element("div");
  if (!Array.isArray(one.group_rewards) || one.group_rewards.length < 2) return section;
  section.append(element("h3", "", "The whole group: reward (advantage)"));
  const mates = data.filter((mate) => mate.kind === one.kind && mate.step === one.step && mate.prompt === one.prompt);
  const strip = element("div", "group");
  one.group_rewards.forEach((reward, member) => {
    const mate = mates.find((other) => other.member === member);
    const cell = element("button", `status ${style(reward)}${member === one.member ? " chosen" : ""}`);
    const gain = one.group_advantages ? one.group_advantages[member] : undefined;
    cell.textContent = number(reward, 2) + (typeof gain === "number" ? ` (${gain > 0 ? "+" : ""}${number(gain, 2)})` : "");
    cell.disabled = !mate;
    cell.title = mate ? "show it" : "its text is not in the log";
    if (mate) cell.onclick = () => pane.show(mate);
    strip.append(cell);
  });
  section.append(strip);
  return section;
}

function facts(one) {
  const found = [`${one.kind} step ${one.step}`, one.agent, one.status, `${one.num_generated_tokens} tokens`];
  if (one.num_turns > 1) found.push(`${one.num_turns} turns`);
  if (one.versions.length) found.push(`weights ${one.versions.join(", ")}`);
  if (typeof advantage(one) === "number") found.push(`advantage ${number(advantage(one), 3)}`);
  return found.join(" · ");
}

function makePane(root, isSecond) {
  const step = element("select"), count = element("span", "note"), list = element("div", "list"), detail = element("div", "card");
  const pane = { shown: null };
  const head = element("div", "panehead");
  head.append(step, count);
  root.append(head, list, detail);

  pane.show = (one) => {
    pane.shown = one;
    const top = element("div", "cardhead");
    top.append(element("b", `status ${style(one.reward)}`, typeof one.reward === "number" ? `reward ${number(one.reward, 3)}` : "no verdict"), element("span", "", facts(one)));
    const why = element("p", "why", one.reason);
    detail.replaceChildren(top, element("p", "prompt", one.prompt_text), answer(one), why, group(one, pane));
    for (const row of list.children) row.classList.toggle("chosen", row.rollout === one);
  };
  pane.draw = () => {
    const mine = data.filter((one) => one.kind === byId("kind").value && (!step.value || String(one.step) === step.value));
    const found = mine.filter(matches);
    count.textContent = `${found.length} of ${mine.length} rollouts`;
    list.replaceChildren(...found.slice(0, 2000).map((one) => {
      const row = element("button", "row");
      row.rollout = one;
      row.append(element("b", `status ${style(one.reward)}`, number(one.reward, 2)), element("span", "agent", one.agent));
      row.append(element("span", "line", `step ${one.step} · ${one.num_generated_tokens} tokens · ${one.output_text.slice(0, 160)}`));
      row.onclick = () => pane.show(one);
      return row;
    }));
    const next = found.includes(pane.shown) ? pane.shown : found[0];
    if (next) pane.show(next); else detail.replaceChildren(element("p", "nothing", "no rollout matches"));
  };
  pane.reset = () => {
    const steps = unique(data.filter((one) => one.kind === byId("kind").value).map((one) => one.step)).sort((a, b) => a - b);
    step.replaceChildren();
    fill(step, steps, "all steps");
    if (byId("beside").checked) step.value = String(isSecond ? steps[steps.length - 1] : steps[0]);
  };
  step.onchange = pane.draw;
  panes.push(pane);
}

function redraw() {
  byId("second").hidden = !byId("beside").checked;
  panes.forEach((pane, index) => { if (!index || byId("beside").checked) pane.draw(); });
}

function reset() {
  panes.forEach((pane) => pane.reset());
  redraw();
}

fill(byId("kind"), kinds);
fill(byId("agent"), unique(data.map((one) => one.agent)).sort(), "every environment");
fill(byId("status"), unique(data.map((one) => one.status)).sort(), "every status");
makePane(byId("first"), false);
makePane(byId("second"), true);
for (const id of ["kind", "beside"]) byId(id).onchange = reset;
for (const id of ["agent", "status", "colour", "low", "high", "shortest", "longest", "text"]) byId(id).oninput = redraw;
reset();
