// Shows a page of `session.py` on Lichess' chessground and sends the user's actions to the kernel, which has the rules.

const ARROWS = 5; // per source
const SHADE = 0.5; // opacity of maps, low enough to see the arrows
const COLOURS = ["#0072b2", "#d55e00", "#000000", "#009e73"]; // Okabe-Ito, colour-blind safe
const BRUSHES = Object.fromEntries(COLOURS.map((color, i) => [`kind${i}`, { key: `kind${i}`, color, opacity: 0.85, lineWidth: 10 }]));
const LABELLED = 0.05; // arrows from this probability on have a label
const ROLES = { q: "queen", r: "rook", b: "bishop", n: "knight" };
const FILES = "abcdefgh";

async function importLibrary(source) {
  const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  try {
    return await import(address);
  } finally {
    URL.revokeObjectURL(address);
  }
}

function element(parent, tag, properties = {}, ...children) {
  const one = Object.assign(document.createElement(tag), properties);
  one.append(...children);
  parent?.append(one);
  return one;
}

function arrows(page, shown) {
  return Object.entries(page.arrows).flatMap(([whose, moves], number) =>
    shown.has(whose)
      ? moves.slice(0, ARROWS).map(([move, share]) => ({
          orig: move.slice(0, 2),
          dest: move.slice(2, 4),
          brush: `kind${number}`,
          label: share >= LABELLED ? { text: `${Math.round(100 * share)}%` } : undefined,
          modifiers: { lineWidth: 3 + 12 * share },
        }))
      : [],
  );
}

function squares(colours) {
  return (colours ?? []).map((colour, square) => ({
    orig: FILES[square % 8] + (1 + Math.floor(square / 8)),
    customSvg: { html: `<rect width="100" height="100" fill="${colour}" opacity="${SHADE}"/>` },
    below: true,
  }));
}

function chancesPicture(chances) {
  const parts = chances.map(([white, draw], at) => {
    const top = 1 - white - draw;
    return (
      `<rect x="${at}" width="1" y="0" height="${top}" fill="#222"/>` +
      `<rect x="${at}" width="1" y="${top}" height="${draw}" fill="#999"/>` +
      `<rect x="${at}" width="1" y="${1 - white}" height="${white}" fill="#fff"/>`
    );
  });
  const wide = Math.max(chances.length, 12);
  return `<svg class="chances" viewBox="0 0 ${wide} 1" preserveAspectRatio="none">${parts.join("")}</svg>`;
}

async function render({ model, el }) {
  const { Chessground } = await importLibrary(model.get("library"));
  element(el, "style", { textContent: model.get("style_sheets") });
  const root = element(el, "div", { className: "matrixlib-board" });
  const place = element(root, "div", { className: "place" });
  const board = element(place, "div");
  const aside = element(root, "div", { className: "aside" });
  const send = (kind, more = {}) => model.send({ kind, ...more });
  const plays = "destinations" in model.get("page");
  const shown = new Set(plays ? [] : Object.keys(model.get("page").arrows));
  let map = "";
  let flipped = false;
  let seat = "";

  const status = element(aside, "div", { className: "status" });
  const problem = element(aside, "div", { className: "problem" });
  const chances = element(aside, "div");
  const odds = element(aside, "div", { className: "odds" });
  const toggles = element(aside, "div", { className: "row toggles" });
  const key = element(aside, "div", { className: "row key" });
  const line = element(aside, "div", { className: "line" });
  const press = (row, text, act) => element(row, "button", { textContent: text, onclick: act });
  let game = null;

  const flip = () => {
    flipped = !flipped;
    draw();
  };
  if (plays) {
    const row = element(aside, "div", { className: "row" });
    press(row, "take back", () => send("back"));
    press(row, "resign", () => send("resign"));
    press(row, "flip", flip);
    press(row, "search here", () => send("search"));
    const limits = element(aside, "div", { className: "row" });
    const number = (name) => {
      const label = element(limits, "label", {}, `${name} `);
      const limit = () => send("limit", { simulations: simulations.value, seconds: seconds.value });
      const input = element(label, "input", { type: "number", min: 0, onchange: limit, className: name });
      input.value = model.get("page")[name];
      return input;
    };
    const simulations = number("simulations");
    const seconds = number("seconds");
    const begin = element(aside, "div", { className: "row" });
    const start = element(begin, "input", { className: "start", placeholder: "a FEN; empty: the start position" });
    const side = element(begin, "select", { className: "side" });
    for (const name of ["white", "black"]) element(side, "option", { textContent: name, value: name });
    press(begin, "new game", () => send("new", { start: start.value.trim(), side: side.value }));
    const details = element(aside, "details", {}, element(null, "summary", { textContent: "PGN" }));
    game = element(details, "textarea", { readOnly: true });
  } else {
    press(element(aside, "div", { className: "row" }), "flip", flip);
  }

  const choose = (from, to) => {
    const colour = model.get("page").turn;
    const veil = element(place, "div", { className: "promotion cg-wrap", onclick: () => draw() });
    Object.assign(veil.style, { width: "auto", height: "auto" });
    for (const [letter, role] of Object.entries(ROLES)) {
      const button = element(veil, "button", { title: role }, element(null, "piece", { className: `${role} ${colour}` }));
      button.onclick = (event) => {
        event.stopPropagation();
        veil.remove();
        send("move", { move: from + to + letter });
      };
    }
  };
  const move = (from, to) => {
    if (model.get("page").promotions.includes(from + to)) choose(from, to);
    else send("move", { move: from + to });
  };
  const ground = Chessground(board, {
    animation: { duration: 150 },
    premovable: { enabled: false },
    drawable: { enabled: true, brushes: BRUSHES },
    movable: { free: false, color: undefined, events: { after: move } },
  });

  // chessground caches the board's position until a scroll, but notebooks also move it otherwise
  place.addEventListener("pointerenter", () => ground.state.dom.bounds.clear());

  const drawToggles = (page) => {
    toggles.replaceChildren();
    key.replaceChildren();
    Object.keys(page.arrows).forEach((whose, number) => {
      const label = element(toggles, "label");
      const change = () => (shown.has(whose) ? shown.delete(whose) : shown.add(whose), draw());
      element(label, "input", { type: "checkbox", checked: shown.has(whose), onchange: change, className: whose });
      element(label, "span", { className: "swatch" }).style.background = COLOURS[number];
      label.append(whose);
    });
    const heads = Object.keys(page.maps);
    if (!heads.length) return;
    if (!heads.includes(map)) map = "";
    for (const [name, colour] of page.keys[map] ?? []) {
      const entry = element(key, "span", {}, element(null, "span", { className: "swatch" }), name);
      entry.firstChild.style.background = colour;
    }
    const label = element(toggles, "label", {}, "map ");
    const select = element(label, "select", { className: "map", onchange: () => ((map = select.value), draw()) });
    for (const head of ["", ...heads]) element(select, "option", { value: head, textContent: head || "none" });
    select.value = map;
  };

  const draw = () => {
    const page = model.get("page");
    const own = page.side ?? "white";
    const other = own === "white" ? "black" : "white";
    if (own !== seat) flipped = false; // new game with the other side
    seat = own;
    place.querySelector(".promotion")?.remove(); // of the previous page
    drawToggles(page);
    ground.set({
      fen: page.fen,
      orientation: flipped ? other : own,
      turnColor: page.turn,
      check: page.check && page.turn,
      lastMove: page.last,
      viewOnly: !plays,
      movable: { color: plays ? own : undefined, dests: new Map(Object.entries(page.destinations ?? {})) },
      drawable: { autoShapes: [...squares(page.maps[map]), ...arrows(page, shown)] },
    });
    root.dataset.thinking = page.thinking ?? false;
    root.dataset.fen = page.fen;
    status.textContent = page.status;
    problem.textContent = page.problem ?? "";
    line.textContent = page.line;
    if (page.chances?.length) {
      chances.innerHTML = chancesPicture(page.chances);
      const [white, drawn, black] = page.chances.at(-1).map((share) => `${Math.round(100 * share)}%`);
      odds.textContent = `White ${white}, draw ${drawn}, Black ${black}`;
    }
    if (game) game.value = page.pgn;
  };
  const leave = () => send("closed");
  model.on("change:page", draw);
  window.addEventListener("pagehide", leave);
  draw();
  requestAnimationFrame(() => ground.redrawAll()); // the layout is known only now
  send("open");
  return () => {
    model.off("change:page", draw);
    window.removeEventListener("pagehide", leave);
    leave();
    ground.destroy();
  };
}

export default { render };
