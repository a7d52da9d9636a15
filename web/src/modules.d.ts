declare module "*.svg" {
  const url: string;
  export default url;
}
declare module "elkjs/lib/elk-worker.min.js" {
  const url: string;
  export default url;
}
