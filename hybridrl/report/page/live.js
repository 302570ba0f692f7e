"use strict";
// What is new, from the server that gave the page.
(function () {
  const POLL_MS = 2000;

  async function get(path) {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  }

  // Asks which parts are new, and for these, one after the other; nothing while nobody looks.
  // `take(name, part)` gets each; `tell(gone)` is called after each round.
  Report.follow = function follow(take, tell) {
    const known = {};
    async function round() {
      if (!document.hidden) {
        try {
          const versions = await get("versions");
          for (const name of Object.keys(versions)) {
            if (versions[name] === known[name]) continue;
            take(name, await get(`part/${name}`));
            known[name] = versions[name];
          }
          tell(false);
        } catch (error) {
          tell(error instanceof TypeError); // nobody answers; else the next round may go well
        }
      }
      setTimeout(round, POLL_MS);
    }
    document.addEventListener("visibilitychange", () => { if (!document.hidden) tell(false); });
    round();
  };
})();
