// The chat's own script: drawer, composer, and staying at the bottom while a reply comes. frame.js comes before it.
(() => {
  const root = document.documentElement;
  const near = (el) => el.scrollHeight - el.scrollTop - el.clientHeight < 80;
  const grow = (el) => { el.style.height = "auto"; el.style.height = `${Math.min(el.scrollHeight, 220)}px`; };
  const input = () => document.querySelector(".rw-input");

  Object.assign(window.rewarm, {
    toggleDrawer(open) {
      const app = document.querySelector(".rw-app");
      const name = matchMedia("(min-width: 960px)").matches ? "rw-drawer-closed" : "rw-drawer-open";
      app?.classList.toggle(name, open);
    },
    closeDrawer() { document.querySelector(".rw-app")?.classList.remove("rw-drawer-open"); },
    focus() { input()?.focus(); },
    // A conversation is shown: its address stays for a reload.
    opened(address) {
      history.replaceState(history.state, "", address);
      window.rewarm.closeDrawer();
      if (matchMedia("(hover: hover)").matches) window.rewarm.focus();
    },
    // A field that has just been drawn.
    select(id) {
      const when = (n) => {
        const el = document.getElementById(id);
        if (el) { el.focus(); el.select(); } else if (n) requestAnimationFrame(() => when(n - 1));
      };
      when(20);
    },
    // The text to send, or null; the field is emptied when there is some.
    take() {
      const el = input();
      if (!el || el.closest(".rw-busy") || !el.value.trim()) return null;
      const text = el.value;
      el.value = "";
      grow(el);
      el.focus();
      stick = true;
      return text;
    },
  });

  let stick = true;
  const watch = (scroller) => {
    scroller.scrollTop = scroller.scrollHeight;
    scroller.addEventListener("scroll", () => { stick = near(scroller); }, { passive: true });
    // Each block of code gets a button; the reply's text is drawn anew with every piece of it.
    const copies = () => {
      for (const head of scroller.querySelectorAll(".rw-code-head:not(:has(button))")) {
        const button = document.createElement("button");
        button.type = "button";
        button.className = "rw-code-copy";
        button.textContent = "Copy";
        head.append(button);
      }
    };
    copies();
    new MutationObserver(copies).observe(scroller, { childList: true, subtree: true });
    const follow = () => { if (stick) scroller.scrollTop = scroller.scrollHeight; };
    new ResizeObserver(follow).observe(scroller);
    new MutationObserver(follow)
      .observe(scroller, { childList: true, subtree: true, characterData: true });
  };
  document.addEventListener("input", (e) => { if (e.target.matches?.(".rw-input")) grow(e.target); });
  // On a machine with a keyboard the next thing typed belongs to the message; a phone's would cover the page.
  document.addEventListener("click", (e) => {
    if (e.detail > 0 && e.target.closest?.(".rw-header .rw-button, .rw-footer .rw-button") && matchMedia("(hover: hover)").matches) {
      window.rewarm.focus();
    }
  });
  document.addEventListener("click", (e) => {
    const code = e.target.closest?.(".rw-code-copy")?.closest(".rw-code")?.querySelector("pre");
    if (code) window.rewarm.copy(code.textContent);
  });
  document.addEventListener("keydown", (e) => { if (e.key === "Escape") window.rewarm.closeDrawer(); });
  const started = new MutationObserver(() => {
    const scroller = document.querySelector(".rw-scroll");
    if (!scroller) return;
    started.disconnect();
    watch(scroller);
    if (matchMedia("(hover: hover)").matches) window.rewarm.focus();
  });
  started.observe(root, { childList: true, subtree: true });
})();
