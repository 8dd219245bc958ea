'use strict';
/* Numbers as the rest of hocket writes them, and two painters of one frame: SVG and canvas. */
const hocketPaint = (() => {
  const SVG = 'http://www.w3.org/2000/svg';
  const PHASES = ['forward', 'backward', 'optimizer'];
  const CLASSES = [...PHASES, 'transfer'];

  // ── numbers ──────────────────────────────────────────────────────────────────────────────

  function threeDigits(value) {
    if (value === 0) return '0';
    const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
    const text = value.toFixed(Math.min(digits, 20));
    return text.includes('.') ? text.replace(/0+$/, '').replace(/\.$/, '') : text;
  }

  function seconds(value) {
    for (const [unit, scale] of [['s', 1], ['ms', 1e-3], ['µs', 1e-6]]) {
      if (Math.abs(value) >= scale * 0.9999999 || value === 0) return `${threeDigits(value / scale)} ${unit}`;
    }
    return `${threeDigits(value / 1e-9)} ns`;
  }

  function bytes(value) {
    const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
    return unit ? `${value.toFixed(1)} ${units[unit]}` : `${value.toFixed(0)} B`;
  }

  function percent(share) { return share > 0 && share < 0.005 ? '<1 %' : `${(100 * share).toFixed(0)} %`; }

  function tickStep(length, count) {
    const rough = length / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= rough * (1 - 1e-9));
  }

  const shortEnd = (name, room) => (name.length > room ? `${name.slice(0, room - 1)}…` : name);

  /** Both ends of the name of a link tell: which link, and which way. */
  function shortMiddle(name, room) {
    if (name.length <= room) return name;
    const tail = Math.ceil((room - 1) * 0.6);
    return `${name.slice(0, room - 1 - tail)}…${name.slice(-tail)}`;
  }

  // ── two painters of the same frame ───────────────────────────────────────────────────────

  function svgPainter() {
    const root = document.createElementNS(SVG, 'svg');
    root.setAttribute('class', 'hocket-svg');
    root.setAttribute('aria-hidden', 'true');
    const add = (tag, name, attributes, text) => {
      const node = document.createElementNS(SVG, tag);
      if (name) node.setAttribute('class', name);
      for (const key in attributes) node.setAttribute(key, attributes[key]);
      if (text !== undefined) node.textContent = text;
      root.append(node);
    };
    const r = (value) => value.toFixed(1);
    const trail = (points) => points.map(([x, y], i) => `${i ? 'L' : 'M'}${r(x)} ${r(y)}`).join('');
    const paint = (frame) => {
      root.replaceChildren();
      root.setAttribute('viewBox', `0 0 ${frame.width} ${frame.height}`);
      root.setAttribute('height', frame.height);
      for (const name in frame.rects) {
        const list = frame.rects[name];
        let path = '';
        for (let i = 0; i < list.length; i += 4) path += `M${r(list[i])} ${r(list[i + 1])}h${r(list[i + 2])}v${r(list[i + 3])}h${r(-list[i + 2])}z`;
        const dim = frame.onlyPath && CLASSES.includes(name) ? `${name} dimmed` : name;
        if (path) add('path', dim, { d: path });
        if (name === 'track') add('path', 'grid', { d: frame.grid.map((x) => `M${r(x)} 18V${frame.height - 4}`).join('') });
      }
      for (const [name, points] of frame.areas) add('path', name, { d: `${trail(points)}Z` });
      for (const [name, points] of frame.lines) add('path', name, { d: trail(points) });
      for (const [name, x, y, text, anchor] of frame.texts) add('text', name, { x: r(x), y: r(y), 'text-anchor': anchor }, text);
    };
    return { root, paint };
  }

  function canvasPainter() {
    const root = document.createElement('canvas');
    root.setAttribute('aria-hidden', 'true');
    const context = root.getContext('2d');
    const paint = (frame) => {
      const style = getComputedStyle(document.documentElement);
      const colour = (name) => style.getPropertyValue(`--${name}`).trim();
      const ratio = window.devicePixelRatio || 1;
      root.width = Math.round(frame.width * ratio);
      root.height = Math.round(frame.height * ratio);
      root.style.height = `${frame.height}px`;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      for (const name in frame.rects) {
        const list = frame.rects[name];
        context.fillStyle = colour(name === 'track' ? 'panel' : name);
        context.globalAlpha = frame.onlyPath && CLASSES.includes(name) ? 0.22 : 1;
        for (let i = 0; i < list.length; i += 4) context.fillRect(list[i], list[i + 1], list[i + 2], list[i + 3]);
        context.globalAlpha = 1;
        if (name !== 'track') continue;
        context.fillStyle = colour('rule');
        for (const x of frame.grid) context.fillRect(Math.round(x), 18, 1, frame.height - 22);
      }
      const trace = (points) => { context.beginPath(); for (const [x, y] of points) context.lineTo(x, y); };
      for (const [name, points] of frame.areas) { context.fillStyle = colour(name); trace(points); context.fill(); }
      for (const [name, points] of frame.lines) {
        const dashed = name.startsWith('capacity');
        context.strokeStyle = colour(name === 'capacity over' ? 'critical' : dashed ? 'muted' : name);
        context.setLineDash(dashed ? [4, 3] : []);
        trace(points);
        context.stroke();
      }
      const family = style.fontFamily;
      for (const [name, x, y, text, anchor] of frame.texts) {
        context.font = `${name === 'label' ? 12 : 11}px ${family}`;
        context.fillStyle = colour({ label: 'ink', small: 'ink', muted: 'muted', over: 'critical', 'mark-label': 'paper' }[name]);
        context.textAlign = anchor;
        context.fillText(text, x, y);
      }
    };
    return { root, paint };
  }

  return { PHASES, CLASSES, seconds, bytes, percent, tickStep, shortEnd, shortMiddle, svgPainter, canvasPainter };
})();
