"use strict";
// The tokens of a sample, each coloured by what is known of it.
(function () {
  const { h, replace, known, number } = Report;

  const NAMES = {
    rollout_log_probs: "log-probability (generator)", log_probs: "log-probability (trainer)",
    difference: "trainer − generator", ref_log_probs: "log-probability (reference)",
    advantages: "advantage", values: "value", returns: "return", response_mask: "mask",
  };
  const SIGNED = new Set(["advantages", "difference", "values", "returns"]);
  const LEAST_LOG_PROB = -5; // what is less likely is coloured as this

  function valuesOf(tokens, name) {
    if (name !== "difference") return tokens[name];
    if (!tokens.log_probs || !tokens.rollout_log_probs) return undefined;
    return tokens.log_probs.map((one, index) => known(one) && known(tokens.rollout_log_probs[index])
      ? one - tokens.rollout_log_probs[index] : null);
  }

  // What of this sample can be coloured: [name, words].
  function choices(tokens) {
    return Object.entries(NAMES).filter(([name]) => valuesOf(tokens, name));
  }

  function strongest(values) {
    return Math.max(1e-9, ...values.filter(known).map(Math.abs));
  }

  // Blue for more, orange for less; unlikely tokens orange.
  function colourOf(value, name, most) {
    if (!known(value) || name === "response_mask") return "";
    const part = SIGNED.has(name) ? value / most : Math.max(LEAST_LOG_PROB, value) / -LEAST_LOG_PROB;
    const strength = (0.75 * Math.min(1, Math.abs(part))).toFixed(3);
    return part < 0 ? `rgba(232, 120, 50, ${strength})` : `rgba(60, 130, 215, ${strength})`;
  }

  function scale(name, values) {
    const most = number(strongest(values));
    if (name === "response_mask") return "underlined: not learned from (mask 0)";
    const [low, high] = SIGNED.has(name) ? [`−${most}`, most] : [String(LEAST_LOG_PROB), "0"];
    const background = SIGNED.has(name)
      ? "linear-gradient(90deg, rgba(232,120,50,.75), transparent, rgba(60,130,215,.75))"
      : "linear-gradient(90deg, rgba(232,120,50,.75), transparent)";
    return [low, h("i", { style: { background } }), high];
  }

  function visible(text) {
    return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t") || "∅";
  }

  // Turns of an episode: what the model said, and, off the mask, what the environment answered.
  function heading(tokens, rewards, index) {
    if (!tokens.turn) return null;
    const turn = tokens.turn[index], mask = tokens.response_mask;
    const isModel = !mask || mask[index] === 1;
    const before = index > 0 && tokens.turn[index - 1] === turn
      && (!mask || (mask[index - 1] === 1) === isModel);
    if (before) return null;
    const reward = isModel && rewards && known(rewards[turn]) ? `, reward ${number(rewards[turn])}` : "";
    return h("span", { class: "turn" },
      isModel ? `turn ${turn + 1}, model${reward}` : `turn ${turn + 1}, environment`);
  }

  function colouredTokens(sample, name) {
    const { tokens } = sample;
    const values = valuesOf(tokens, name) || [];
    const most = strongest(values);
    const readout = h("p", { class: "note", "aria-live": "polite" },
      "Point at a token, or move over them with the arrow keys.");
    const elements = [];
    let at = -1;
    const show = (index) => {
      if (elements[at]) elements[at].classList.remove("at");
      at = Math.max(0, Math.min(elements.length - 1, index));
      elements[at].classList.add("at");
      const facts = choices(tokens).map(([one, words]) =>
        `${words} ${number(valuesOf(tokens, one)[at])}`);
      replace(readout, h("b", {}, `${at + 1} of ${elements.length} `), h("code", {},
        visible(tokens.text[at])), ` · ${facts.join(" · ")}`);
    };
    const shown = tokens.text.map((text, index) => {
      const off = tokens.response_mask && tokens.response_mask[index] === 0;
      const element = h("span", { class: off ? "token off" : "token",
        style: { background: colourOf(values[index], name, most) },
        onpointerenter: () => show(index) }, visible(text));
      elements.push(element);
      return [heading(tokens, sample.turn_rewards, index), element];
    });
    const box = h("div", { class: "text", tabindex: "0", role: "group", "aria-label": "Tokens",
      onkeydown: (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!by) return;
        event.preventDefault();
        show(at + by);
      } }, shown);
    return [box, readout,
      sample.tokens_left_out ? h("p", { class: "note" },
        `${number(sample.tokens_left_out)} further tokens are left out.`) : null];
  }

  Object.assign(Report, { tokenChoices: choices, tokenScale: (tokens, name) =>
    scale(name, valuesOf(tokens, name) || []), colouredTokens });
})();
