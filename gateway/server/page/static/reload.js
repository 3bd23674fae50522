// Loads the page again when one of its files did not arrive: the network changed, or the
// gateway was restarted in between. Part of the HTML itself, so that it runs whatever else is
// missing.
const RELOADS = "fitserve.reloads",
  MAX_REST_S = 15;
let reloads = false;
addEventListener(
  "error",
  ({ target }) => {
    const isPart =
      target instanceof HTMLScriptElement ||
      (target instanceof HTMLLinkElement && target.rel !== "icon");
    if (!isPart || reloads) return;
    reloads = true;
    const count = Number(sessionStorage.getItem(RELOADS));
    const pauseS = Math.min(2 ** count, MAX_REST_S);
    sessionStorage.setItem(RELOADS, count + 1);
    const show = () => {
      document.getElementById("link").textContent =
        `A file of this page did not arrive. Next try in ${pauseS} s.`;
    };
    if (document.readyState === "loading") addEventListener("DOMContentLoaded", show);
    else show();
    setTimeout(() => location.reload(), pauseS * 1000);
  },
  true,
);
addEventListener("load", () => reloads || sessionStorage.removeItem(RELOADS));
