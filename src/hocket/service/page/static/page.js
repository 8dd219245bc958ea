"use strict";
// The page is whole without this script. With it, parts that changed are fetched and put in place
// when the service tells of an event, and the form is answered without loading the page again.
(() => {
  const EVENTS = [
    "work-lost", "message", "submitted", "started", "running", "stopped", "stopping", "succeeded", "failed", "cancelled",
    "paused", "resumed", "device-type-unknown", "device-lost", "device-added", "device-back", "drained", "reopened", "timed out", "round", "checkpoint", "dropped",
  ];
  const SOON_MS = 150, REST_MS = 1000, IDLE_MS = 15000;
  const status = document.getElementById("status");
  let timer = 0, last = 0, isBusy = false, isAsked = false;

  function tell(text, kind) {
    if (status.textContent !== text) status.textContent = text;
    status.className = kind;
  }

  async function page(url) {
    const answer = await fetch(url, { headers: { Accept: "text/html" }, credentials: "same-origin", signal: AbortSignal.timeout(15000) });
    if (answer.redirected && new URL(answer.url).pathname === "/login") { location.assign("/login"); return null; }
    if (!answer.ok) throw new Error(`answer ${answer.status}`);
    return new DOMParser().parseFromString(await answer.text(), "text/html");
  }

  // What a person did to a part outlives its replacement: what is open, where it is scrolled, the focus.
  function keep(old, fresh) {
    for (const box of old.querySelectorAll("details[id]")) {
      const same = fresh.querySelector(`#${CSS.escape(box.id)}`);
      if (same) same.open = box.open;
    }
    const before = [...old.querySelectorAll(".scroll, pre")].map((box) => [box.scrollLeft, box.scrollTop]);
    const focus = old.contains(document.activeElement) ? document.activeElement : null;
    const places = focus ? [...old.querySelectorAll("a, summary, button, [tabindex]")].indexOf(focus) : -1;
    return () => {
      [...fresh.querySelectorAll(".scroll, pre")].forEach((box, at) => {
        if (before[at]) [box.scrollLeft, box.scrollTop] = before[at];
      });
      if (!focus) return;
      const byId = focus.id && document.getElementById(focus.id);
      const target = byId || [...fresh.querySelectorAll("a, summary, button, [tabindex]")][places] || fresh;
      target.focus({ preventScroll: true });
    };
  }

  function replace(found) {
    for (const fresh of found.querySelectorAll("[data-live]")) {
      const old = document.getElementById(fresh.id);
      if (!old) { location.reload(); return; }
      const restore = keep(old, fresh);
      if (old.outerHTML === fresh.outerHTML) continue;
      old.replaceWith(document.adoptNode(fresh));
      restore();
    }
    if (found.title) document.title = found.title;
  }

  async function refresh() {
    clearTimeout(timer);
    if (isBusy) { isAsked = true; return; }
    isBusy = true;
    try {
      const found = await page(location.pathname === "/" ? "/live" : location.pathname);
      if (found) replace(found);
    } catch { /* The stream tells that the service is away; the next event or the clock tries again. */ }
    isBusy = false;
    last = Date.now();
    timer = setTimeout(refresh, isAsked ? REST_MS : IDLE_MS);
    isAsked = false;
  }

  function soon() {
    clearTimeout(timer);
    timer = setTimeout(refresh, Math.max(SOON_MS, REST_MS - (Date.now() - last)));
  }

  function listen() {
    const stream = new EventSource("/v1/events");
    stream.addEventListener("open", () => { tell("live", "live"); soon(); });
    stream.addEventListener("error", () => {
      tell("the service is away, trying again", "away");
      // Refused for good, as after signing out elsewhere: the page itself leads to the sign-in.
      if (stream.readyState === EventSource.CLOSED) setTimeout(() => { refresh(); listen(); }, 5000);
    });
    for (const name of EVENTS) stream.addEventListener(name, soon);
  }

  const form = document.getElementById("what-if-form");
  if (form) form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const box = document.getElementById("what-if-answer");
    box.setAttribute("aria-busy", "true");
    box.textContent = "Looking ahead …";
    try {
      const found = await page(`/what-if?${new URLSearchParams(new FormData(form))}`);
      if (found) box.replaceChildren(...found.getElementById("what-if-answer").childNodes);
    } catch {
      box.textContent = "The service did not answer; try again.";
    }
    box.removeAttribute("aria-busy");
  });

  const signOut = document.getElementById("sign-out");
  signOut.hidden = false;
  signOut.addEventListener("click", async () => {
    await fetch("/logout", { method: "POST", headers: { "X-Hocket-Page": "1" }, redirect: "manual" });
    location.assign("/login");
  });

  // Where the picture is wider than the screen, the newest is what people look for.
  const picture = document.querySelector("#devices .scroll");
  if (picture) picture.scrollLeft = picture.scrollWidth;

  listen();
})();
