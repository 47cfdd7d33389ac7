// What all pages share: the theme, and what is copied. Everything else is done by the server through NiceGUI.
(() => {
  const root = document.documentElement;
  const KEY = "rewarm-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem(KEY); } catch { /* private windows may refuse: see below */ }
  const apply = () => {
    const choice = chosen === "dark" || chosen === "light" ? chosen : "system";
    root.dataset.choice = choice;
    root.dataset.theme = choice === "system" ? (system.matches ? "dark" : "light") : choice;
  };
  apply();
  system.addEventListener("change", apply);
  // Another tab chose.
  addEventListener("storage", (e) => { if (e.key === KEY) { chosen = e.newValue; apply(); } });

  let hiding = 0;
  window.rewarm = {
    // System, light, dark, and round again.
    nextTheme() {
      chosen = { system: "light", light: "dark", dark: null }[root.dataset.choice];
      try {
        if (chosen) localStorage.setItem(KEY, chosen);
        else localStorage.removeItem(KEY);
      } catch { /* the choice then lasts as long as the page */ }
      apply();
    },
    toast(words) {
      let el = document.querySelector(".rw-toast");
      if (!el) {
        el = document.createElement("div");
        el.className = "rw-toast";
        el.setAttribute("role", "status");
        document.body.append(el);
      }
      el.textContent = words;
      requestAnimationFrame(() => el.classList.add("rw-shown"));
      clearTimeout(hiding);
      hiding = setTimeout(() => el.classList.remove("rw-shown"), 1800);
    },
    async copy(text) {
      try {
        await navigator.clipboard.writeText(text);
        window.rewarm.toast("Copied");
      } catch {
        window.rewarm.toast("The browser does not allow copying here");
      }
    },
    // A native dialog by its element: it is found by id, since NiceGUI names elements c1, c2, ...
    open(id) { const el = document.getElementById(id); if (el && !el.open) el.showModal(); },
    close(id) { document.getElementById(id)?.close(); },
  };
  document.addEventListener("click", (e) => {
    const from = e.target.closest?.("[data-copy]");
    if (from) window.rewarm.copy(from.dataset.copy);
    // A click beside a dialog closes it.
    if (e.target.matches?.("dialog.rw-dialog") && e.detail > 0) {
      const box = e.target.getBoundingClientRect();
      const inside = e.clientX >= box.left && e.clientX <= box.right && e.clientY >= box.top && e.clientY <= box.bottom;
      if (!inside) e.target.close();
    }
  });
})();
