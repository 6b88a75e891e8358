// Keeps the page current: asks for it again and puts in place what changed. Nothing here makes markup of data; the
// node does that once, for readers without scripts too.
"use strict";

(() => {
  const USUAL_MS = 2000, LONGEST_MS = 30000, ANSWER_MS = 8000;
  const connection = document.getElementById("connection");
  const pause = document.getElementById("pause");
  const form = document.querySelector("form[role=search]");
  let wait = USUAL_MS, timer = 0, asking = null, isPaused = false, seenAt = new Date();

  const clock = (moment) => moment.toLocaleTimeString();
  const say = (text) => { if (connection.textContent !== text) connection.textContent = text; };

  // What somebody has selected, or stands in, is left alone until the next time.
  function isInUse(element) {
    const selection = document.getSelection();
    const isSelected = selection && !selection.isCollapsed && selection.containsNode(element, true);
    return isSelected || (element.contains(document.activeElement) && document.activeElement !== document.body);
  }

  function take(text) {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    document.title = fresh.title;
    for (const old of document.querySelectorAll("[data-live]")) {
      const other = fresh.getElementById(old.id);
      if (other && other.innerHTML !== old.innerHTML && !isInUse(old)) old.replaceChildren(...other.childNodes);
    }
    const charts = [...fresh.querySelectorAll(".charts > figure")];
    const shown = document.querySelectorAll(".charts > figure");
    if (charts.length > shown.length) document.querySelector(".charts").append(...charts.slice(shown.length));
  }

  function where() {
    const query = new URLSearchParams(new FormData(form)).toString();
    return query === "level=debug&text=" ? "/" : "/?" + query;
  }

  async function ask({ once = false } = {}) {
    clearTimeout(timer);
    if (asking) asking.abort();
    if ((isPaused && !once) || document.hidden) return;
    const mine = asking = new AbortController();
    const limit = setTimeout(() => mine.abort(), ANSWER_MS);
    try {
      const answer = await fetch(where(), { signal: mine.signal, cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      take(await answer.text());
      seenAt = new Date();
      wait = USUAL_MS;
      document.body.classList.remove("gone");
      say(isPaused ? `Paused at ${clock(seenAt)}` : "Live");
    } catch {
      if (mine !== asking) return; // asked anew meanwhile
      wait = Math.min(2 * wait, LONGEST_MS);
      document.body.classList.add("gone");
      say(`The node does not answer. Below is what it said at ${clock(seenAt)}. It is asked again every ${LONGEST_MS / 1000} s or sooner.`);
    } finally {
      clearTimeout(limit);
    }
    if (mine === asking) timer = setTimeout(() => ask(), wait);
  }

  document.getElementById("still").hidden = true;
  pause.hidden = false;
  pause.addEventListener("click", () => {
    isPaused = !isPaused;
    pause.setAttribute("aria-pressed", String(isPaused));
    if (isPaused) say(`Paused at ${clock(new Date())}`);
    ask();
  });
  document.addEventListener("visibilitychange", () => ask());

  const filter = () => { history.replaceState(null, "", where() + "#log"); wait = USUAL_MS; ask({ once: true }); };
  let typing = 0;
  form.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(filter, 200); });
  form.addEventListener("submit", (event) => { event.preventDefault(); filter(); });

  say("Live");
  timer = setTimeout(() => ask(), wait);
})();
